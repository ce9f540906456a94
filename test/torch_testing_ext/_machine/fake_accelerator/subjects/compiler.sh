#!/bin/sh
# Stands for a C++ compiler: counts its calls in CALLS, and does as AS says.
if [ "$1" = --version ]; then echo "${VERSION:-stand-in 1.0}"; exit 0; fi
echo "$@" >> "$CALLS"
while [ "$1" != -o ]; do shift; done
case "$AS" in
  fails) echo "device.h:1: no such thing"; exit 1 ;;
  dies) echo half > "$2"; kill -9 $$ ;;
  *) echo whole > "$2" ;;
esac
