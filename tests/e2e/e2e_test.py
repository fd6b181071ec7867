#!/usr/bin/env python3
"""Whole-program tests: viaduct train, submit, get, watch and cancel with real worker processes on a tiny job.

Usage: e2e_test.py PROGRAM_FOLDER [unittest argument ...]      (the folder with viaduct and the programs beside it)
"""
import io
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
import zlib

PROGRAMS = pathlib.Path(sys.argv.pop(1)).resolve()
LEASE_S = 10
HEARTBEATS_S = 5  # two of them and some
SLOW = 4 if os.environ.get("VIADUCT_E2E_SLOW") else 1  # sanitizers

JOB = """\
model:
  vision: {image_size: 16, patch_size: 8, width: 16, layers: 1, heads: 2}
  llm: {width: 16, layers: 1, heads: 2, mlp_width: 32, max_tokens: 64}
data: {train: ["%(data)s/train.tar"], heldout: ["%(data)s/heldout.tar"]}
modules:
  - {name: vision, pool: encoders, dp: 2}
  - {name: llm, pool: decoders, tp: 2}
pools:
  - {name: encoders, role: encoder}
  - {name: decoders, role: llm}
training: {steps: 20, global_batch: 4}
optimizer: {learning_rate: 0.01, warmup_steps: 2, max_grad_norm: 1.0}
checkpoint: {directory: "%(data)s/out/checkpoint"}
evaluation: {captions: 2, max_new_tokens: 8}
"""


def make_png(red, green, blue, side=16):
    """A square of one colour."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    row = b"\0" + bytes([red, green, blue]) * side
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(row * side)) + chunk(b"IEND", b""))


def write_shard(path, first, count, spoil=None):
    colours = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
    with tarfile.open(path, "w") as tar:
        for i in range(first, first + count):
            name, rgb = list(colours.items())[i % len(colours)]
            image = make_png(*rgb)
            if spoil == i:
                image = image[:40] + b"\0\0\0\0" + image[44:]
            for suffix, data in ((".png", image), (".txt", name.encode())):
                member = tarfile.TarInfo(f"s{i:04d}{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


class Fixture(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)
        write_shard(self.folder / "train.tar", 0, 16)
        write_shard(self.folder / "heldout.tar", 16, 4)
        self.job = self.folder / "job.yaml"
        self.job.write_text(JOB % {"data": self.folder})
        self.output = self.folder / "out"
        self.started = []

    def tearDown(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.assert_nothing_left()
        self.temporary.cleanup()

    def start(self, program, *arguments):
        process = subprocess.Popen([PROGRAMS / program, *map(str, arguments)], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def finish(self, process, code, timeout=60):
        out, err = process.communicate(timeout=timeout * SLOW)
        self.assertEqual(process.returncode, code, out + err)
        return out, err

    def run_viaduct(self, code, *arguments, timeout=60):
        return self.finish(self.start("viaduct", *arguments), code, timeout)

    def ours(self):
        """pid -> command line of every process of this test that runs still: its paths are in the arguments or the environment's folder."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                errors = os.readlink(entry / "fd/2")
            except OSError:
                continue
            if errors.startswith(str(self.folder)) or any(str(self.folder).encode() in word for word in words):
                found[int(entry.name)] = b" ".join(words).decode()
        return found

    def assert_nothing_left(self):
        deadline = time.monotonic() + 3
        while self.ours() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(self.ours(), {})

    def wait_until(self, condition, what, timeout=30):
        deadline = time.monotonic() + timeout * SLOW
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"not in time: {what}")
            time.sleep(0.02)

    def start_long_run(self):
        """A run that would take for ever, once its first step is done."""
        process = self.start("viaduct", "train", self.job, "--set", "training.steps=1000000", "--verbose")
        log = self.output / "logs/llm-0.log"
        self.wait_until(lambda: log.exists() and "step 5:" in log.read_text(), "the fifth step")
        return process

    def worker_pid(self, name):
        for pid, words in self.ours().items():
            if f"--name {name} " in words + " " and "-worker" in words:
                return pid
        self.fail(f"no worker {name} among {self.ours()}")


class TrainTest(Fixture):
    def test_a_job_runs_to_its_end(self):
        out, _ = self.run_viaduct(0, "train", self.job)
        for part in ("SUCCEEDED", "held-out loss", "generated", "checkpoint:"):
            self.assertIn(part, out)
        summary = json.loads((self.output / "summary.json").read_text())
        self.assertEqual(summary["steps"], 20)
        self.assertEqual(summary["state"], "SUCCEEDED")
        self.assertEqual(summary["boundary_bytes"], summary["boundary_bytes_min"])
        self.assertGreater(summary["boundary_bytes"], 0)
        self.assertGreater(summary["tokens_per_second"], 0)
        self.assertGreater(summary["heldout_loss_shuffled"], 0)
        self.assertEqual(summary["layouts"]["llm"]["tp"], 2)
        self.assertTrue(pathlib.Path(summary["checkpoint"]).is_dir())

    def test_resume_goes_on_from_the_newest_checkpoint(self):
        self.run_viaduct(0, "train", self.job, "--set", "training.steps=10")
        out, _ = self.run_viaduct(0, "train", self.job, "--resume")
        self.assertIn("resuming from", out)
        self.assertEqual(json.loads((self.output / "summary.json").read_text())["steps"], 20)

    def test_resume_without_a_checkpoint_is_told(self):
        _, err = self.run_viaduct(4, "train", self.job, "--resume")
        self.assertIn("no complete checkpoint", err)

    def check_killed(self, name, number):
        process = self.start_long_run()
        os.kill(self.worker_pid(name), number)
        killed = time.monotonic()
        _, err = self.finish(process, 1)
        self.assertLess(time.monotonic() - killed, (LEASE_S + 4) * SLOW)
        self.assertRegex(err, rf"worker {name} \(rank \d\) was lost at step \d+ in \w+")
        self.assert_nothing_left()

    def test_a_killed_encoder_worker_fails_the_job(self):
        self.check_killed("encoder-1", signal.SIGKILL)

    def test_a_killed_llm_worker_fails_the_job(self):
        self.check_killed("llm-0", signal.SIGKILL)

    def test_a_stopped_worker_fails_the_job_within_the_lease(self):
        self.check_killed("llm-1", signal.SIGSTOP)

    def test_interrupt_stops_all(self):
        process = self.start_long_run()
        process.send_signal(signal.SIGINT)
        self.finish(process, 7, 15)
        self.assert_nothing_left()

    def test_second_interrupt_kills_all(self):
        process = self.start_long_run()
        os.kill(self.worker_pid("llm-0"), signal.SIGSTOP)  # so that the first cannot be obeyed
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        self.finish(process, 130, 5)
        self.assert_nothing_left()

    def test_nothing_outlives_a_killed_viaduct(self):
        process = self.start_long_run()
        process.kill()
        process.communicate()
        self.assert_nothing_left()


def with_layout(job, modules, pools):
    """The job with other modules and pools."""
    head, rest = job.split("modules:\n", 1)
    return head + "modules:\n" + modules + "pools:\n" + pools + rest[rest.index("training:"):]


class LayoutTest(Fixture):
    def write_layout(self, modules, pools):
        text = self.job.read_text().replace("layers: 1", "layers: 2").replace("global_batch: 4", "global_batch: 8, microbatches: 4")
        self.job.write_text(with_layout(text, modules, pools))

    def run_layout(self, modules, pools, workers):
        self.write_layout(modules, pools)
        out, err = self.run_viaduct(0, "train", self.job, "--set", "training.steps=6")
        self.assertEqual(len(list((self.output / "logs").glob("*-[0-9]*.log"))), workers, out + err)
        return json.loads((self.output / "summary.json").read_text())

    def test_pipelines_context_and_sequence_parallelism(self):
        summary = self.run_layout("  - {name: vision, pool: encoders, pp: 2, cp: 2}\n"
                                  "  - {name: llm, pool: decoders, tp: 2, cp: 2, pp: 2, sequence_parallel: true}\n",
                                  "  - {name: encoders, role: encoder}\n  - {name: decoders, role: llm}\n", 12)
        self.assertEqual(summary["steps"], 6)
        self.assertEqual(summary["boundary_bytes"], summary["boundary_bytes_min"])
        self.assertGreater(summary["boundary_bytes"], 0)

    def test_colocated(self):
        layouts = [("  - {name: vision, pool: decoders}\n  - {name: llm, pool: decoders}\n", 1),
                   ("  - {name: vision, pool: decoders, dp: 4}\n"
                    "  - {name: llm, pool: decoders, tp: 2, pp: 2}\n", 4)]
        losses = []
        original = self.job.read_text()
        for modules, workers in layouts:
            self.job.write_text(original)
            summary = self.run_layout(modules, "  - {name: decoders, role: llm}\n", workers)
            losses.append((summary["train_loss"], summary["heldout_loss"]))
        for a, b in zip(*losses):
            self.assertAlmostEqual(a, b, delta=1e-3 * a)

    def test_text_alone(self):
        """A job without any encoder: samples without images."""
        for shard in ("train", "heldout"):
            with tarfile.open(self.folder / f"{shard}.tar", "w") as tar:
                for i in range(8):
                    member = tarfile.TarInfo(f"s{i:04d}.txt")
                    member.size = 6
                    tar.addfile(member, io.BytesIO(b"word %d" % i))
        text = self.job.read_text()
        text = "\n".join(line for line in text.split("\n") if "vision" not in line and "encoder" not in line)
        self.job.write_text(text.replace("layers: 1", "layers: 2"))
        layout = ["--set", "modules.llm.pp=2", "--set", "training.microbatches=2"]
        out, _ = self.run_viaduct(0, "train", self.job, *layout)
        self.assertRegex(out, r"held-out loss at step 20: [0-9.]+ nats per label\n")
        self.assertIn("generated", out)
        self.assertEqual(json.loads((self.output / "summary.json").read_text())["boundary_bytes"], 0)
        out, _ = self.run_viaduct(0, "verify", self.job, *layout)
        self.assertIn("4 ranks against one process", out)
        out, _ = self.run_viaduct(0, "plan", self.job, *layout)
        self.assertNotIn("encoders", out)

    def check_lost(self, name, number):
        """The job ends within the lease, and says who was lost in which operation of which microbatch."""
        process = self.start_long_run()
        begin = time.monotonic()
        self.wait_until(lambda: time.monotonic() > begin + HEARTBEATS_S, "heartbeats that say what each worker does")
        os.kill(self.worker_pid(name), number)
        killed = time.monotonic()
        _, err = self.finish(process, 1)
        self.assertLess(time.monotonic() - killed, (LEASE_S + 4) * SLOW)
        self.assertRegex(err, rf"worker {name} \(rank \d\) was lost at step \d{{2,}} in [A-Z_]+( of microbatch \d)?: ")
        self.assert_nothing_left()

    def test_a_killed_stage_fails_a_pipelined_job(self):
        self.write_layout("  - {name: vision, pool: encoders, pp: 2}\n  - {name: llm, pool: decoders, pp: 2, tp: 2}\n",
                          "  - {name: encoders, role: encoder}\n  - {name: decoders, role: llm}\n")
        self.check_lost("llm-2", signal.SIGKILL)

    def test_a_stopped_stage_fails_a_colocated_job_within_the_lease(self):
        self.write_layout("  - {name: vision, pool: decoders, dp: 4}\n  - {name: llm, pool: decoders, tp: 2, pp: 2}\n",
                          "  - {name: decoders, role: llm}\n")
        self.check_lost("llm-3", signal.SIGSTOP)

    def test_verify_and_plan(self):
        layout = ["--set", "modules.llm.cp=2", "--set", "training.microbatches=2"]
        out, _ = self.run_viaduct(0, "verify", self.job, *layout, "-o", "json")
        result = json.loads(out)
        self.assertTrue(result["equal"])
        self.assertEqual(result["ranks"], 6)
        self.assertEqual(len(result["steps"]), 3)
        self.assertIn("language_model.lm_head.weight", [tensor["name"] for tensor in result["tensors"]])
        out, _ = self.run_viaduct(0, "verify", self.job, "--steps", 1)
        self.assertIn("EQUAL", out)
        out, _ = self.run_viaduct(0, "plan", self.job, *layout, "-o", "json")
        plan = json.loads(out)
        self.assertEqual(plan["ranks"], 6)
        self.assertTrue(all(row["bytes"] > row["weights"] > 0 for row in plan["memory"]))
        out, _ = self.run_viaduct(0, "plan", self.job)
        self.assertRegex(out, r"vision +encoders +2")
        self.run_viaduct(2, "verify", self.job, "--steps", 99)
        self.run_viaduct(2, "plan")


class BadInputTest(Fixture):
    def test_missing_job_file(self):
        _, err = self.run_viaduct(4, "train", self.folder / "none.yaml")
        self.assertIn("none.yaml: cannot open it", err)

    def test_wrong_type_is_named_with_its_place(self):
        self.job.write_text(self.job.read_text().replace("steps: 20", "steps: many"))
        _, err = self.run_viaduct(2, "train", self.job)
        self.assertRegex(err, r'job\.yaml:11:19: training\.steps: expected a whole number, got "many"')

    def test_every_problem_is_listed(self):
        _, err = self.run_viaduct(2, "train", self.job, "--set", "training.steps=-1", "--set", "modules.llm.pp=9")
        self.assertIn("training.steps: is -1", err)
        self.assertIn("modules[1].pp: is 9", err)

    def check_bad_data(self, *parts):
        _, err = self.run_viaduct(1, "train", self.job)
        for part in parts:
            self.assertIn(part, err)
        self.assert_nothing_left()

    def test_missing_data(self):
        (self.folder / "train.tar").unlink()
        self.check_bad_data("train.tar", "FAILED")

    def test_corrupt_tar(self):
        data = (self.folder / "train.tar").read_bytes()
        (self.folder / "train.tar").write_bytes(data[:1500])
        self.check_bad_data("train.tar", "FAILED")

    def test_corrupt_png(self):
        write_shard(self.folder / "train.tar", 0, 16, spoil=5)
        self.check_bad_data("s0005", "FAILED")

    def test_wrong_use(self):
        self.run_viaduct(2)
        _, err = self.run_viaduct(2, "trian")
        self.assertIn('no verb "trian"', err)
        _, err = self.run_viaduct(2, "train", self.job, "--resum")
        self.assertIn("did you mean --resume?", err)
        self.run_viaduct(0, "--help")
        self.run_viaduct(0, "train", "--help")


class CoordinatorTest(Fixture):
    def setUp(self):
        super().setUp()
        self.server = self.start("viaduct-coordinator", "--listen", "127.0.0.1:0")
        self.address = self.server.stdout.readline().strip()

    def client(self, code, *arguments, timeout=30):
        return self.run_viaduct(code, *arguments, "--coordinator", self.address, timeout=timeout)

    def worker(self, role, name):
        return self.start(f"viaduct-{role}-worker", "--coordinator", self.address, "--name", name)

    def test_more_workers_than_present_is_told_and_ends(self):
        self.worker("llm", "a-0")
        self.wait_until(lambda: "a-0" in self.client(0, "get", "workers", "-o", "name")[0], "the worker")
        out, err = self.client(1, "submit", "-f", self.job, "--id", "big", "--wait", "--set", "timeouts.start=2s")
        self.assertEqual(out, "jobs/big\n")
        self.assertIn("needs 2 encoder workers, 0 present; needs 2 llm workers, 1 present", err)

    def test_a_job_through_the_coordinator(self):
        for name in ("encoder-0", "encoder-1"):
            self.worker("encoder", name)
        for name in ("llm-0", "llm-1"):
            self.worker("llm", name)
        out, _ = self.client(0, "submit", "-f", self.job, "--id", "one", "--wait", timeout=60)
        self.assertEqual(out, "jobs/one\n")
        job = json.loads(self.client(0, "get", "jobs", "one", "-o", "json")[0])
        self.assertEqual(job["status"]["state"], "SUCCEEDED")
        self.assertEqual(job["status"]["committed_step"], 20)
        self.assertIn("state: SUCCEEDED", self.client(0, "get", "jobs", "one", "-o", "yaml")[0])
        self.assertRegex(self.client(0, "get")[0], r"NAME +STATE +STEP.*\none +SUCCEEDED +20/20")
        self.client(0, "watch", "one")
        _, err = self.client(5, "submit", "-f", self.job, "--id", "one")
        self.assertIn("already", err)
        # The same workers serve a second job: nothing of the first is left in them.
        self.client(0, "submit", "-f", self.job, "--id", "two", "--wait", timeout=60)

    def test_cancel_and_not_found(self):
        self.client(0, "submit", "-f", self.job, "--id", "one")
        self.assertIn("CANCELLED", self.client(0, "cancel", "one")[0])
        self.client(7, "watch", "one")
        self.client(4, "cancel", "none")
        self.client(4, "get", "jobs", "none")

    def test_no_coordinator(self):
        _, err = self.run_viaduct(3, "get", "--coordinator", "127.0.0.1:1")
        self.assertIn("cannot be reached", err)

    def test_a_worker_that_is_told_to_stop_leaves(self):
        worker = self.worker("llm", "a-0")
        self.wait_until(lambda: "a-0" in self.client(0, "get", "workers", "-o", "name")[0], "the worker")
        worker.terminate()
        self.finish(worker, 0, 10)
        self.assertIn("LEFT", self.client(0, "get", "workers")[0])

    def tearDown(self):
        for process in reversed(self.started):
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            process.communicate(timeout=20 * SLOW)
        self.assertEqual(self.server.returncode, 0)
        super().tearDown()


if __name__ == "__main__":
    unittest.main(verbosity=2)
