#!/bin/sh
# Runs a command of the project in a bare Debian 12, so that a package this machine happens to have cannot hide a missing one.
# Usage (as root): tests/bare_debian.sh FOLDER COMMAND [ARGUMENT ...]
#   FOLDER    where the tree is made, once, with debootstrap; later runs use it again as the last one left it
#   COMMAND   run in a copy of the last commit, e.g. examples/emoji/run.sh or tests/run.sh
set -eu
if [ $# -lt 2 ]; then
    sed -n '3,5s/^# //p' "$0" >&2
    exit 2
fi
tree=$1
shift
cd "$(dirname "$0")/.."
command -v debootstrap >/dev/null || {
    echo "$0: debootstrap is missing: apt-get install debootstrap" >&2
    exit 1
}
mirror=${VIADUCT_DEBIAN_MIRROR:-http://deb.debian.org/debian}
[ -e "$tree/etc/debian_version" ] || debootstrap --variant=minbase bookworm "$tree" "$mirror"

rm -rf "$tree/viaduct"
mkdir -p "$tree/viaduct"
git archive HEAD | tar -x -C "$tree/viaduct"
cp /etc/resolv.conf "$tree/etc/resolv.conf"

# A mount namespace of its own: /proc, /sys and /dev/shm of the tree are gone with the command.
export tree
exec unshare --mount --pid --fork sh -c '
    mount -t proc proc "$tree/proc"
    mount --rbind /sys "$tree/sys"
    mount -t tmpfs -o mode=1777 tmpfs "$tree/dev/shm"
    exec chroot "$tree" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
        sh -c "cd /viaduct && exec \"\$@\"" sh "$@"' sh "$@"
