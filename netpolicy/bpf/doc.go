// Package bpf holds the compiled programs for an endpoint's TAP device, and the code that loads them.
//
// `go generate` needs Debian bookworm's clang-14, llvm-14 and libbpf-dev (scripts/deps bpf); the objects are
// committed, so that building drowse needs none of them. A test compiles the source again and compares the objects byte
// for byte.
package bpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-14 -cflags "-O2 -g -Wall -Werror -fdebug-prefix-map=.=. -I/usr/include/x86_64-linux-gnu" -target amd64 -type event -type usage -type counter -type flow -type flow_key -type alias -type pin -type pin_key -type tagged Endpoint endpoint.c
