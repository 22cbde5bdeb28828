"""Export: layers in programs and libraries of others.

In: a Plan with weights, or a program that holds our operators. Out: plain operators of torch for
ONNX and AOTInductor, operators of CoLA, our operators registered when a program is loaded.
May import: structures, errors, layers.strided.
"""
