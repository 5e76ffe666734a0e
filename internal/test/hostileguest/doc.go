// Package hostileguest attacks every device from inside a VM: a guest of its own, of a few KiB, that has no kernel and
// no driver, only the wish to break what serves it.
//
// The guest (folder guest) runs on two vCPUs. The first fills the queues of all devices with malformed chains and with
// requests that lie; the second changes rings, descriptors, registers and ports meanwhile, under the devices' hands.
// The host's half is the test: it boots the guest on this machine's KVM, pauses it all the time, saves and restores it,
// uses the devices from its own side, and looks at what it costs: the time from pause to stillness, memory, files,
// goroutines, log.
//
//	go test ./internal/test/hostileguest -v                       # 10 seconds
//	make test-hostile                                        # an hour on each kind of KVM
//	make test-hostile HOSTILE='-hostile-for 10m -hostile-seed 7'
//
// The guest's random numbers follow from the seed, which is printed. What two vCPUs and the devices do at once does
// not.
//
// The guest is in C and is committed as guest/guest.elf, so that running it needs no compiler. go generate makes it
// with the gcc of Debian bookworm.
package hostileguest

//go:generate sh -c "cd guest && gcc-12 -Os -std=gnu11 -Wall -Wextra -Werror -ffreestanding -nostdlib -static -no-pie -fno-pic -fno-stack-protector -fno-asynchronous-unwind-tables -fcf-protection=none -mno-red-zone -mgeneral-regs-only -mcmodel=small -Wl,-T,guest.ld,--build-id=none,-z,noexecstack,-z,max-page-size=4096,--no-warn-rwx-segments,-s -o guest.elf start.S guest.c"
