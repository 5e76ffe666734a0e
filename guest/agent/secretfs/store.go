package secretfs

import (
	"errors"
	"fmt"
	"hash/crc32"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Ports are the registers of the device, by their offsets in agentpb.
type Ports interface {
	Write(reg uint16, v uint32)
	Read(reg uint16) uint32
	// Fill fills p from the data register.
	Fill(p []byte)
	Wiped()
}

// store reads the host's secrets.
type store struct{ ports Ports }

// What can go wrong at the ports.
var (
	errNoDevice = errors.New("this VM's host has no device for secrets: it runs an older drowse")
	errGone     = errors.New("the secret has been taken away or replaced")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// tries bounds the reads of data that change during a read, or that a page fault has torn: the fault restarts the
// instruction, but the device goes on from where it was.
const tries = 4

// table returns all secrets. Names and sizes are not secret.
func (s store) table() ([]agentpb.Secret, error) {
	for range tries {
		s.ports.Write(agentpb.SecretsSelect, agentpb.SecretsTable)
		n := s.ports.Read(agentpb.SecretsSelect)
		if n > agentpb.MaxSecretsTable {
			return nil, errNoDevice
		}
		b := make([]byte, n)
		if s.fill(b) {
			return agentpb.DecodeSecrets(b)
		}
	}
	return nil, fmt.Errorf("read the table of secrets: %w", unix.EIO)
}

// fill reads into p, and reports whether p has what the host sent.
func (s store) fill(p []byte) bool {
	s.ports.Fill(p)
	return s.ports.Read(agentpb.SecretsSeek) == crc32.Checksum(p, castagnoli)
}

// read fills p with bytes of a secret, and returns how many there were. p must be in memory that is wiped. The
// caller calls Wiped.
func (s store) read(sec agentpb.Secret, off uint64, p []byte) (int, error) {
	if off >= uint64(sec.Size) {
		return 0, nil
	}
	want := uint32(min(uint64(len(p)), uint64(sec.Size)-off))
	for range tries {
		s.ports.Write(agentpb.SecretsSelect, sec.ID)
		s.ports.Write(agentpb.SecretsSeek, uint32(off))
		if s.ports.Read(agentpb.SecretsSelect) != sec.Size-uint32(off) {
			return 0, errGone
		}
		if s.fill(p[:want]) {
			return int(want), nil
		}
		clear(p[:want])
	}
	return 0, errGone
}
