package secretfs

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// IOPorts are the machine's own ports. They work on the thread that has opened them.
type IOPorts struct{}

// OpenPorts gives the calling thread access to the ports (ioperm(2)) as long as the thread lives.
func OpenPorts() (IOPorts, error) {
	_, _, errno := syscall.RawSyscall(unix.SYS_IOPERM, agentpb.SecretsPort, agentpb.SecretsPorts, 1)
	if errno != 0 {
		return IOPorts{}, fmt.Errorf("open the I/O ports of secrets: %w", errno)
	}
	return IOPorts{}, nil
}

// Write implements Ports.
func (IOPorts) Write(reg uint16, v uint32) { out32(agentpb.SecretsPort+reg, v) }

// Read implements Ports.
func (IOPorts) Read(reg uint16) uint32 { return in32(agentpb.SecretsPort + reg) }

// Fill implements Ports.
func (IOPorts) Fill(p []byte) {
	if len(p) > 0 {
		insb(agentpb.SecretsPort+agentpb.SecretsData, &p[0], len(p))
	}
}

// Wiped implements Ports.
func (IOPorts) Wiped() { out8(agentpb.SecretsPort+agentpb.SecretsWiped, 1) }

//go:noescape
func out8(port uint16, v byte)

//go:noescape
func out32(port uint16, v uint32)

//go:noescape
func in32(port uint16) uint32

// insb reads n bytes from a port, straight into memory.
//
//go:noescape
func insb(port uint16, p *byte, n int)
