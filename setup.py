"""Builds the compiled engine where there is a C compiler; the package works without it."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "src/einlinear/layers/engine"
FLAGS = ["-std=gnu11", "-O3", "-g0", "-ffp-contract=fast", "-fvisibility=hidden"]
SECONDS = 20  # that compiling takes, about


class BuildEngine(build_ext):
    """A plain shared library, loaded by ctypes: no module to initialise, no Python inside."""

    def build_extension(self, ext):
        """Compile, or say in one line why not."""
        if os.environ.get("EINLINEAR_NO_ENGINE", "") not in ("", "0"):
            self._leave_out("EINLINEAR_NO_ENGINE is set")
            return
        self._say(f"compiling the engine (about {SECONDS} s)")
        try:
            super().build_extension(ext)
        except Exception as error:
            self._leave_out(f"it could not be compiled ({str(error).splitlines()[0]})")

    def _leave_out(self, reason):
        self._say(f"installing without the compiled engine: {reason}")
        self.library.unlink(missing_ok=True)  # an earlier build may have been luckier

    def _say(self, text):
        sys.stderr.write(f"einlinear: {text}\n")
        sys.stderr.flush()

    def run(self):
        """Build, and remove what earlier builds have left and this one does not replace."""
        super().run()
        kept = [self.library.name] if self.library.exists() else []
        for folder in [self.library.parent, *[Path(FOLDER)] * bool(self.inplace)]:
            for path in folder.glob("_engine.*"):
                if path.name not in kept:
                    path.unlink()

    @property
    def library(self):
        """Where the library is built."""
        return Path(self.build_lib, self.get_ext_filename(self.extensions[0]._full_name))

    def get_ext_filename(self, fullname):
        """The same name for every Python: no module is loaded from it."""
        return os.path.join(*fullname.split(".")) + (".pyd" if os.name == "nt" else ".so")

    def get_export_symbols(self, ext):
        """None but its own: there is no PyInit function."""
        return ext.export_symbols

    def copy_extensions_to_source(self):
        """For an editable install; there is nothing to copy if it was left out."""
        if self.library.exists():
            super().copy_extensions_to_source()


class EngineWheel(bdist_wheel):
    """One wheel for every Python of a machine; for every machine if there is no engine in it."""

    def run_command(self, command):
        """Look after the build whether there is an engine."""
        super().run_command(command)
        if command == "build" and not self.get_finalized_command("build_ext").library.exists():
            self.distribution.ext_modules = []
            self.root_is_pure = True

    def get_tag(self):
        """No Python in it: its own tag says which machine at most."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "einlinear.layers.engine._engine",
            sources=sorted(map(str, Path(FOLDER).glob("*.c"))),
            depends=sorted(map(str, Path(FOLDER).glob("*.h"))),
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread", "-lm"],
            optional=True,
        )
    ],
    cmdclass={"bdist_wheel": EngineWheel, "build_ext": BuildEngine},
)
