"""The sandbox's filter of system calls, as bubblewrap takes it: it refuses what a small program has no use for.

These are calls that reach beyond the namespaces (vsock knows none; io_setup takes from what the whole machine has) or
into other processes of the sandbox (limits, priorities), memory that no limit counts (memfd, System V, rules of
Landlock, watches of inotify and fanotify, pages that a pipe holds by vmsplice), and parts of the kernel that have often
been a way out of a sandbox.
"""

from __future__ import annotations

import platform
import struct

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below; AUDIT_ARCH_… of linux/audit.h
REFUSED = {  # numbers of asm/unistd_64.h and asm-generic/unistd.h
    "add_key": (248, 217),
    "bpf": (321, 280),
    "fanotify_init": (300, 262),
    "inotify_add_watch": (254, 27),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "keyctl": (250, 219),
    "landlock_create_ruleset": (444, 444),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "shmget": (29, 194),
    "socket": (41, 198),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
ONLY = {  # calls that get this first argument alone: the process itself, AF_UNIX
    "prlimit64": (302, 261, 0),
    "socketpair": (53, 199, 1),
}
X32 = 0x40000000  # bit of the numbers of x86_64's second table
LOAD, JUMP_IF_EQUAL, JUMP_IF_ABOVE, RETURN = 0x20, 0x15, 0x35, 0x06  # of linux/bpf_common.h
KILL, ALLOW, EPERM = 0x80000000, 0x7FFF0000, 0x00050001  # SECCOMP_RET_… of linux/seccomp.h


def build_filter(machine: str = platform.machine()) -> bytes:
    """A program for seccomp (an array of struct sock_filter): EPERM for REFUSED and for other arguments than those of
    ONLY, death by another architecture's calls.

    Raises KeyError for a machine whose numbers are not known.
    """
    column, architecture = MACHINES[machine]
    numbers = [call[column] for call in REFUSED.values()]
    checks = [
        instruction
        for *call, argument in ONLY.values()
        for instruction in (
            (JUMP_IF_EQUAL, 0, 4, call[column]),
            (LOAD, 0, 0, 16),  # seccomp_data.args[0], its lower half
            (JUMP_IF_EQUAL, 0, 1, argument),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, EPERM),
        )
    ]
    refusals = [(JUMP_IF_EQUAL, len(numbers) - i + len(checks), 0, number) for i, number in enumerate(numbers)]
    program = [
        (LOAD, 0, 0, 4),  # seccomp_data.arch
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # seccomp_data.nr
        (JUMP_IF_ABOVE, len(numbers) + len(checks) + 1, 0, X32),
        *refusals,
        *checks,
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
