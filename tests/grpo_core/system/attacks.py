"""Functions by which a program attacks the sandbox: the code before the programs of test_sandbox.py."""

ATTACKS = """
import os

def tried(attack):
    try:
        return attack()
    except (OSError, MemoryError, RuntimeError) as error:
        return getattr(error, "strerror", None) or type(error).__name__

def read(path):
    return tried(lambda: open(path).read())

def write(path):
    return tried(lambda: open(path, "w").write("here"))

def connect(family, address):
    import socket
    return tried(lambda: socket.socket(family, socket.SOCK_STREAM).connect(address))

def call(number, *arguments):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    return os.strerror(ctypes.get_errno()) if libc.syscall(number, *arguments) < 0 else "done"

def mark(name):
    import ctypes
    ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME: the host can tell these processes by it

def forks(name):
    mark(name)
    made = 0
    while made < 1000:
        try:
            if os.fork() == 0:
                __import__("time").sleep(1000)
        except OSError as error:
            return made, error.strerror
        made += 1
    return made, "no end"

def daemon(name):
    mark(name)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            __import__("time").sleep(1000)
        os._exit(0)
    return "left"

def threads():
    import threading, time
    for made in range(1000):
        try:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        except RuntimeError:
            return made
    return made

def fill(folder):
    written = 0
    for number in range(100):
        try:
            with open(f"{folder}/{number}", "wb") as file:
                written += file.write(bytes(1 << 20))
        except OSError as error:
            return written, error.strerror

def files(folder):
    '''Make 5,000 files, then wait for what ends this.'''
    for number in range(5000):
        try:
            os.mknod(f"{folder}/{number}")
        except OSError as error:
            return number, error.strerror
    __import__("time").sleep(60)
    return 5000, "no end"

def spin():
    while True:
        pass
"""
