#!/usr/bin/env bash
# Makes bare Debian machines here, with no more than Python, git and make, and types README's two commands there.
#     benchmarks/bare_machine.sh FOLDER [CASE ...]    # as root; needs Debian's mmdebstrap and util-linux
# Without a CASE all of them, one after the other: hours, 20 GB. COMMANDS, one per line, replaces README's two.
# FOLDER/machines.md gets one row per case and command, FOLDER/CASE-N.log what command N printed. A root keeps the cache
# and packages of its earlier cases: delete FOLDER for machines that are bare again.
# PIP_*, UV_* and proxy variables hold there too, and the paths that they name are shown there read-only.
set -eu

CASES="bookworm trixie no-history space read-only noexec uv pip"
COMMANDS=${COMMANDS:-$'make quickstart\nmake test'}
VENV='apt-get -qq update && apt-get -qq install --yes python3-venv && python3 -m venv'
PIP="$VENV /opt/pip"'
/opt/pip/bin/pip install --quiet --constraint requirements/cpu.txt .
PATH=/opt/pip/bin:$PATH && cd / && grpo init sums --recipe smallest && cd sums && python -m examples.smallest.make
PATH=/opt/pip/bin:$PATH && cd /sums && grpo run configs/smallest.toml'
project=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
folder=$(realpath "${1:?say in which folder the roots are made}")
shift
mkdir -p "$folder"

make_root() { # SUITE: what a server of Debian's has at least, and the three programs that README asks for
    test -e "$folder/$1/made" || {
        rm -rf "${folder:?}/$1"
        mmdebstrap --quiet --variant=minbase --include=python3,git,make,ca-certificates "$1" "$folder/$1"
        touch "$folder/$1/made"
    }
    cp -L /etc/resolv.conf "$folder/$1/etc/"
    echo "127.0.0.1 localhost" >"$folder/$1/etc/hosts"
}

passed_on() { env -0 | grep -zE '^(PIP_|UV_|SSL_CERT|[a-zA-Z]+_(proxy|PROXY)=)' | grep -zv '^[A-Z]*_CACHE' || true; }

# Runs in namespaces of its own, as the machine's first process. A root by chroot would allow no sandbox: the kernel
# makes no user namespaces there.
enter='
set -e
root=$1 place=$2 kind=$3 command=$4
shift 4
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
for variable in "$@"; do
    for path in ${variable#*=}; do
        path=${path#file://}
        case $path in /*) test ! -e "$path" || {
            test -e "./$path" || { test -d "$path" && mkdir -p "./$path" || install -D /dev/null "./$path"; }
            mount --bind "$path" "./$path"
            mount -o remount,bind,ro "./$path"
        } ;; esac
    done
done
test "$kind" != read-only || { mount --bind "./$place" "./$place"; mount -o remount,bind,ro "./$place"; }
test "$kind" != noexec || {
    mkdir -p noexec
    mount -t tmpfs -o noexec,mode=1777 tmpfs noexec
    set -- "$@" TMPDIR=/noexec
}
test "$kind" != uv || set -- "$@" PATH=/opt/uv/bin:/usr/sbin:/usr/bin:/sbin:/bin
pivot_root . mnt
umount -l /mnt
cd "$place"
exec env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@" bash -c "$command
exit \$?" # this bash stays, and so orphans that end are waited for, as by an init
'

run() { # KIND SUITE PLACE COMMAND LOG
    mapfile -d "" variables < <(passed_on)
    unshare --mount --pid --fork --kill-child --propagation private \
        bash -c "$enter" enter "$folder/$2" "$3" "$1" "$4" "${variables[@]}" >"$5" 2>&1 </dev/null
}

last_words() { # LOG: what the command said last, without make's own lines
    { grep -vE '^(make(\[[0-9]+\])?: |\s*$)' "$1" || true; } | tail -n 1 | cut -c 1-300 | sed 's/|/\\|/g'
}

log=$folder/machines.md
test -e "$log" || cat >"$log" <<END
# Bare machines

\`benchmarks/bare_machine.sh\` at $(git -C "$project" rev-parse --short HEAD), $(date -u +%F), $(nproc) cores of $(
    sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n 1). Not tried: Ubuntu, Fedora.

| machine | command | seconds | status | last words |
|---|---|---|---|---|
END

for kind in ${*:-$CASES}; do
    suite=bookworm place=/root/$kind
    case $kind in
    bookworm | trixie) suite=$kind ;;
    space) place="/root/a space" ;;
    no-history | read-only | noexec | uv | pip) ;;
    *) echo "$kind is none of $CASES" >&2 && exit 2 ;;
    esac
    make_root "$suite"
    rm -rf "${folder:?}/$suite$place"
    git clone --quiet --no-hardlinks "$project" "$folder/$suite$place"
    test "$kind" != no-history || rm -rf "$folder/$suite$place/.git"
    commands=$COMMANDS
    case $kind in
    uv) run plain "$suite" "$place" "$VENV /opt/uv && /opt/uv/bin/pip install --quiet uv" "$folder/uv-0.log" ;;
    pip) commands=$PIP ;;
    esac
    number=0
    while read -r command; do
        number=$((number + 1)) before=$SECONDS status=0
        run "$kind" "$suite" "$place" "$command" "$folder/$kind-$number.log" || status=$?
        row="| $kind | \`$command\` | $((SECONDS - before)) | $status | $(last_words "$folder/$kind-$number.log") |"
        echo "$row" | tee -a "$log"
    done <<<"$commands"
    rm -rf "$folder/$suite$place"
done
