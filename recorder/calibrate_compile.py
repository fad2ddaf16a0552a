"""Compiles CUDA source for one architecture with NVRTC, through cuda-bindings; needs no device."""

from __future__ import annotations

from typing import Any

from nanalyze.rundir.errors import RecorderError

REMEDY = "pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for a driver of CUDA 12)"


class Compiler:
    """NVRTC, loaded once. Raises RecorderError where it cannot be."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise RecorderError(f"calibration needs cuda-bindings (pip install cuda-bindings): {error}") from error
        self._nvrtc: Any = nvrtc
        try:
            code, *version = nvrtc.nvrtcVersion()
        except Exception as error:  # cuda-python's own error where the library is not found
            raise RecorderError(f"calibration compiles its kernels with NVRTC, which is not here: {REMEDY}") from error
        self._check(code, "nvrtcVersion")
        self.version = ".".join(map(str, version))

    def compile(self, source: str, cc_major: int, cc_minor: int, suffix: str = "") -> bytes:
        """The program for `sm_<cc><suffix>`, or PTX for an older architecture where NVRTC knows none as new.

        Raises RecorderError with the first line of NVRTC's log.
        """
        target = f"sm_{cc_major}{cc_minor}{suffix}"
        known = self._architectures()
        if 10 * cc_major + cc_minor not in known and not suffix:
            older = [number for number in known if number < 10 * cc_major + cc_minor]
            if not older:
                raise RecorderError(f"NVRTC {self.version} knows no architecture as old as {target}: {REMEDY}")
            target = f"compute_{max(older)}"
        return self._compile(source, target)

    def _architectures(self) -> list[int]:
        code, numbers = self._nvrtc.nvrtcGetSupportedArchs()
        self._check(code, "nvrtcGetSupportedArchs")
        return [int(number) for number in numbers]

    def _compile(self, source: str, target: str) -> bytes:
        code, program = self._nvrtc.nvrtcCreateProgram(source.encode(), b"calibrate.cu", 0, [], [])
        self._check(code, "nvrtcCreateProgram")
        try:
            options = [f"--gpu-architecture={target}".encode(), b"--disable-warnings"]
            (code,) = self._nvrtc.nvrtcCompileProgram(program, len(options), options)
            if int(code) != 0:
                raise RecorderError(f"NVRTC {self.version} cannot compile for {target}: {self._complaint(program)}")
            return self._output(program, "CUBIN" if target.startswith("sm_") else "PTX")
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)

    def _output(self, program: Any, kind: str) -> bytes:
        code, size = getattr(self._nvrtc, f"nvrtcGet{kind}Size")(program)
        self._check(code, f"nvrtcGet{kind}Size")
        output = bytearray(size)
        (code,) = getattr(self._nvrtc, f"nvrtcGet{kind}")(program, output)
        self._check(code, f"nvrtcGet{kind}")
        return bytes(output)

    def _complaint(self, program: Any) -> str:
        code, size = self._nvrtc.nvrtcGetProgramLogSize(program)
        if int(code) != 0 or not size:
            return "it says nothing about why"
        log = bytearray(size)
        self._nvrtc.nvrtcGetProgramLog(program, log)
        lines = [line.strip() for line in log.rstrip(b"\0").decode(errors="replace").splitlines() if line.strip()]
        return next((line for line in lines if "error" in line), lines[0] if lines else "its log is empty")

    def _check(self, code: Any, function: str) -> None:
        if int(code) != 0:
            raise RecorderError(f"{function} answered {code.name}: {REMEDY}")
