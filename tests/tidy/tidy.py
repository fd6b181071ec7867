#!/usr/bin/env python3
"""Checks what the compiler does not: layers, names, lengths, banned calls, format. docs/STYLE.md gives the rules.

Usage: tidy.py [project folder]. Prints one line per finding; exits 1 if there is any.
"""
import pathlib
import re
import subprocess
import sys

# A folder may include only itself and folders that stand before it.
RUNTIME_LAYERS = ["base", "job", "rpc", "device", "tensor", "kernels", "comm", "reshard", "nn", "data", "checkpoint",
                  "train"]
PROGRAM_FOLDERS = ["encoder_worker", "llm_worker", "coordinator", "cli", "tests", "bench", "examples"]
# Modules are the only thing that one program folder takes from another.
SHARED_PROGRAM_HEADERS = {"encoder_worker/vision_encoder.h", "encoder_worker/audio_encoder.h", "llm_worker/llm.h"}

FUNCTION_LINES_MAX = 70
BANNED_CALLS = {
    "malloc": "memory_alloc", "calloc": "memory_alloc", "realloc": "memory_grow", "free": "memory_free",
    "strdup": "memory_copy_text", "strcpy": "snprintf", "strcat": "snprintf", "sprintf": "snprintf",
    "gets": "fgets", "strtok": "strtok_r", "atoi": "strtol with checks", "atof": "strtod with checks",
    "rand": "rng_bits", "alloca": "an arena", "system": "uv_spawn", "popen": "uv_spawn", "sleep": "a wait with a deadline",
    "usleep": "a wait with a deadline", "nanosleep": "a wait with a deadline", "getenv": "base/config.h",
    "setjmp": "Status", "longjmp": "Status",
}
# Where a banned call is at home.
ALLOWED = {
    ("runtime/base/memory.c", "malloc"), ("runtime/base/memory.c", "calloc"), ("runtime/base/memory.c", "realloc"),
    ("runtime/base/memory.c", "free"), ("runtime/base/memory.c", "strdup"), ("runtime/base/config.c", "getenv"),
    ("runtime/comm/comm_host_test.c", "system"),  # makes network namespaces with ip(8)
}
# Objects that a file owns beside the one it is named after.
EXTRA_PREFIXES = {
    "runtime/comm/channel.h": ["control", "lane"],
    "runtime/comm/endpoint.h": ["channel"],
    "runtime/comm/member.h": ["operation"],
    "runtime/device/device.h": ["stream", "event"],
    "runtime/reshard/layout.h": ["box"],
    "runtime/tensor/tensor.h": ["dtype"],
}

FUNCTION_HEAD = re.compile(r"^(?!static|typedef|struct|enum|union|extern|#|/|\s|\*|\}|\{)[\w\s\*]+?\b(\w+)\(")


def strip_comments(text):
    """The text with comments and string contents blanked, line structure kept."""
    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return re.sub(r"[^\n]", " ", token)
        return token[0] + " " * (len(token) - 2) + token[-1]
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


class Tidy:
    def __init__(self, root):
        self.root = root
        self.findings = []
        names = [str(path.relative_to(root)) for path in root.rglob("*.[ch]")]
        names = [name for name in names if not name.startswith(("build/", "out/", "."))]
        self.files = sorted(name for name in names if (root / name).is_file())

    def report(self, name, line, message):
        self.findings.append(f"{name}:{line}: {message}")

    def check_includes(self, name, lines):
        parts = name.split("/")
        for number, line in enumerate(lines, 1):
            match = re.match(r'#include "([^"]+)"', line)
            if not match:
                continue
            target = match.group(1).split("/")
            if "pb-c.h" in match.group(1):
                continue
            if len(target) < 2:
                self.report(name, number, f'include "{match.group(1)}" with its folder')
            elif parts[0] == "runtime":
                if target[0] not in RUNTIME_LAYERS:
                    self.report(name, number, f"runtime includes {match.group(1)}, which is not of the runtime")
                elif RUNTIME_LAYERS.index(target[0]) > RUNTIME_LAYERS.index(parts[1]):
                    self.report(name, number, f"layer {parts[1]} includes the later layer {target[0]}")
            elif parts[0] in ("encoder_worker", "llm_worker", "coordinator", "cli"):
                if target[0] in PROGRAM_FOLDERS and target[0] != parts[0] and match.group(1) not in SHARED_PROGRAM_HEADERS:
                    self.report(name, number, f"program {parts[0]} includes {match.group(1)} of another program")

    def check_guard(self, name, text):
        parts = pathlib.PurePath(name).with_suffix("").parts
        if parts[0] == "runtime":
            parts = parts[1:]
        guard = "_".join(parts).upper().replace("-", "_") + "_H"
        short = "_".join(parts[-2:]).upper() + "_H"
        if f"#ifndef {guard}\n" not in text and f"#ifndef {short}\n" not in text:
            self.report(name, 1, f"header guard {guard} expected")

    def functions(self, code_lines):
        """(name, first line, last line, is static) of each function definition; relies on the format's braces."""
        head = 0
        for number, line in enumerate(code_lines):
            if line and not line[0].isspace() and line[0] not in "{}#" and "(" in line:
                head = number
            if line == "{" and head < number:
                signature = " ".join(code_lines[head:number])
                match = re.search(r"(\w+)\(", signature)
                end = number
                while end < len(code_lines) and code_lines[end] != "}":
                    end += 1
                if match and ";" not in signature and "=" not in signature.split("(")[0]:
                    yield match.group(1), head + 1, end + 1, signature.startswith("static")

    def check_functions(self, name, code_lines):
        path = pathlib.PurePath(name)
        stem = path.stem
        is_test = stem.endswith("_test") or name.startswith(("tests/", "bench/"))
        is_kernel = "kernels/cpu/" in name or "kernels/cuda/" in name
        prefixes = [stem, path.parent.name, *EXTRA_PREFIXES.get(name[:-1] + "h", [])]
        # device_cpu.c may define device_cpu_*; comm_host_tcp.c comm_host_*; kernels/cpu files name the op.
        prefixes += ["_".join(stem.split("_")[:i]) for i in range(1, stem.count("_") + 1)]
        for function, first, last, is_static in self.functions(code_lines):
            if last - first + 1 > FUNCTION_LINES_MAX and not is_kernel:
                self.report(name, first, f"{function} has {last - first + 1} lines, at most {FUNCTION_LINES_MAX}")
            if is_static or is_test or function in ("main", "LLVMFuzzerTestOneInput"):
                continue
            if is_kernel and function.endswith(("_cpu", "_cuda")):
                continue
            if not any(function.startswith(prefix + "_") or function == prefix for prefix in prefixes):
                self.report(name, first, f"public function {function} does not begin with its file's name {stem}_")

    def check_calls(self, name, code_lines):
        for number, line in enumerate(code_lines, 1):
            for match in re.finditer(r"(?<![\w.>])(\w+)\(", line):
                call = match.group(1)
                better = BANNED_CALLS.get(call)
                if better and (name, call) not in ALLOWED:
                    self.report(name, number, f"{call}() is not used here; use {better}")

    def check_marks(self, name, lines):
        for number, line in enumerate(lines, 1):
            if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
                self.report(name, number, "an open mark: finish it, or say in the docs what is missing")
            if len(line) > 120:
                self.report(name, number, f"{len(line)} columns")

    def check_format(self):
        for command in ("clang-format-14", "clang-format"):
            try:
                done = subprocess.run([command, "--dry-run", "-Werror", *self.files], cwd=self.root, capture_output=True,
                                      text=True, check=False)
            except FileNotFoundError:
                continue
            for line in done.stderr.splitlines():
                match = re.match(r"(.+?):(\d+):\d+: error: (.*)", line)
                if match:
                    self.report(match.group(1), int(match.group(2)), "not as clang-format leaves it")
            return
        self.findings.append("clang-format-14 is missing: deploy/install_packages.sh test")

    def run(self):
        for name in self.files:
            text = (self.root / name).read_text(encoding="utf-8")
            lines = text.split("\n")
            code_lines = strip_comments(text).split("\n")
            self.check_includes(name, lines)
            self.check_marks(name, lines)
            self.check_calls(name, code_lines)
            if name.endswith(".h"):
                self.check_guard(name, text)
            else:
                self.check_functions(name, code_lines)
        self.check_format()
        for finding in self.findings:
            print(finding)
        print(f"tidy: {len(self.files)} files, {len(self.findings)} findings")
        return 1 if self.findings else 0


if __name__ == "__main__":
    sys.exit(Tidy(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()).run())
