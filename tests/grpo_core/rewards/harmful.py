"""A module of rewards that end, block or fill their process, and of some that do no harm."""

# Each does its harm at the completion "b".
HARMFUL = """
import asyncio, ctypes, functools, os, random, signal, subprocess, sys, threading
from collections.abc import Sequence
from decimal import Decimal
from math import inf, nan
import numpy as np

files = []

def harm(function):
    def reward(completions):
        return [function() if completion == "b" else 1.0 for completion in completions]
    return reward

@harm
def ends(): os._exit(0)

@harm
def faults(): ctypes.string_at(0)

@harm
def kills_itself(): os.kill(os.getpid(), signal.SIGKILL)

@harm
def leaves(): sys.exit("enough")

@harm
def takes_memory(): return len(bytearray(10 << 30))

@harm
def keeps_files(): files.extend(open(os.devnull) for _ in range(2000))

@harm
def closes_everything(): os.closerange(0, 1024); return 1.0

class Odd(Exception):
    def __init__(self): super().__init__("odd"); self.unpicklable = lambda: None

@harm
def raises_what_cannot_be_pickled(): raise Odd

@harm
def gives_what_cannot_be_pickled(): return lambda: None

@harm
def stops_its_guard():
    print("pids", os.getppid(), flush=True)
    os.kill(os.getppid(), signal.SIGSTOP)
    wait_for_ever()

def orphan():
    if middle := os.fork():
        os.waitpid(middle, 0)
        return int(os.read(pipe[0], 100))
    if orphan := os.fork():
        os.write(pipe[1], str(orphan).encode())
    os._exit(0)

pipe = os.pipe()

def leaves_orphans(completions):
    # Ids of processes that have ended, and whose parents have.
    return [float(orphan()) for _ in completions]

async def gives_up(completions):
    if "b" in completions: raise GeneratorExit("enough")
    return [1.0]

@harm
def blocks(): wait_for_ever()

def wait_for_ever():
    command = [sys.executable, "-c", "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    print("pids", os.getpid(), child.stdout.readline().decode(), flush=True)
    while True:
        try: threading.Event().wait()
        except BaseException: pass

first, arrived = not os.path.exists(__file__ + ".tried"), []
open(__file__ + ".tried", "w").close()

async def ends_when_all_are_there(completions):
    arrived.extend(completions)
    while first and len(arrived) < 3: await asyncio.sleep(0)
    if "b" in completions: os._exit(3)
    return [1.0] * len(completions)

def draws_and_ends_once(completions):
    calls.append(1)
    if len(calls) == 3 and not os.path.exists("ended"):
        open("ended", "w").close()
        os._exit(9)
    return draws(completions)
calls = []

def meddles(completions):
    os.environ["HOME"] = "elsewhere"
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("x" * (1 << 20))
    sys.stdout.close()
    os.close(1)
    os.fork()
    return [float(len(completions))] * len(completions)

def draws(completions): return [random.random() + np.random.random() for _ in completions]

async def draws_together(completions):
    await asyncio.sleep(0)
    return [random.random() for _ in completions]

async def given_a_bonus(completions, bonus): return [bonus for _ in completions]
with_a_bonus = functools.partial(given_a_bonus, bonus=2.0)

class Length:
    def __call__(self, completions, bonus=0.0): return [len(it) + bonus for it in completions]
an_object = Length()

def hands_on(completions): return given_a_bonus(completions, 3.0)

def typed(completions, answer: Sequence[str], n: list[int | None], m: list[list[int]], o, p: Sequence[Odd] | None): pass

def takes_any(prompts, completions, completion_ids, **columns):
    return [float(len(p + c + a) + i[0]) for p, c, i, a in zip(prompts, completions, completion_ids, columns["answer"])]

def says(completions, answer): return eval(answer[0])
"""
