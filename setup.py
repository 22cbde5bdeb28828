"""Builds the compiled engine where there is a C compiler; the package works without it."""

import os
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "src/einlinear/layers"
FLAGS = ["-std=gnu11", "-O3", "-g0", "-ffp-contract=fast", "-fvisibility=hidden"]


class BuildEngine(build_ext):
    """A plain shared library, loaded by ctypes: no module to initialise, no Python inside."""

    def build_extension(self, ext):
        """Compile, or say in one line why not."""
        if os.environ.get("EINLINEAR_NO_ENGINE", "") not in ("", "0"):
            self._leave_out("EINLINEAR_NO_ENGINE is set")
            return
        try:
            super().build_extension(ext)
        except Exception as error:
            self._leave_out(f"it could not be compiled ({str(error).splitlines()[0]})")

    def _leave_out(self, reason):
        sys.stderr.write(f"einlinear: installing without the compiled engine: {reason}\n")

    def get_export_symbols(self, ext):
        """None but its own: there is no PyInit function."""
        return ext.export_symbols

    def copy_extensions_to_source(self):
        """For an editable install; there is nothing to copy if it was left out."""
        self.extensions = [
            ext for ext in self.extensions if os.path.exists(self.get_ext_fullpath_built(ext))
        ]
        super().copy_extensions_to_source()

    def get_ext_fullpath_built(self, ext):
        """Where the built library is before it is copied."""
        name = self.get_ext_filename(self.get_ext_fullname(ext.name))
        return os.path.join(self.build_lib, name)


setup(
    ext_modules=[
        Extension(
            "einlinear.layers._engine",
            sources=[f"{FOLDER}/engine.c"],
            depends=[f"{FOLDER}/engine_kernel.h", f"{FOLDER}/engine_experts.h"],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildEngine},
)
