"""Train a small GPT with mixtures of block tensor-train experts (BTT-MoE).

Every linear layer but the output head becomes a gate and eight structured experts, two of them
active for each token. The text is embedded in the package, so nothing is downloaded.

    python examples/train_moe_gpt.py
    python examples/train_moe_gpt.py --steps 1000 --width 128 --experts 16
"""

import argparse

import torch

import einlinear as el


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    task = el.open_task("text", context=64)
    model = el.GPT(
        task.vocab_size, context=64, width=args.width, depth=2, head_size=32, positions="rotary"
    )
    print(el.convert_(model, el.moe("btt", num_experts=args.experts, num_active=2)))
    el.init_(model)
    optimizer = torch.optim.AdamW(el.param_groups(model, lr=5e-3, base_width=64))

    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, el.MoELinear)]
    for step in range(args.steps + 1):
        batch = task.batch(step, 16, seed=0)
        loss = task.loss(model(batch.inputs), batch)
        balance = el.balance_loss(model) / len(layers)
        if step % 20 == 0:  # evenness: 1 if all experts of a layer get equally many tokens
            evenness = sum(layer.last_routing.entropy for _, layer in layers) / len(layers)
            print(f"step {step:4d}   loss {loss.item():.3f}   evenness {evenness:.2f}")
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        optimizer.step()

    name, layer = layers[0]
    print(f"load of {name}:", " ".join(f"{share:.2f}" for share in layer.last_routing.load))
    prompt = task.validation(1)[0].inputs[:, :32]
    tokens = el.generate(model, prompt, 60, temperature=0.8, top_k=10)
    print(repr(task.vocabulary.decode(tokens[0].tolist())))


if __name__ == "__main__":
    main()
