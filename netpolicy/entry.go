package netpolicy

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// What an agent's own program knows of struct __sk_buff: its scratch space, of which
// bpf/agent.c reads the first two words.
const (
	ctxSlot  = 48 // cb[0]
	ctxClaim = 52 // cb[1]
)

// shot is TC_ACT_SHOT: the packet is dropped.
const shot = 2

// entry loads an agent's own program for one direction, the one that is on its device.
// It says whose packet it is and calls the program of the host, which does not return. If
// that is not there, the packet is dropped.
func entry(calls *ebpf.Map, dir int, slot, claim uint32, before ...asm.Instruction) (*ebpf.Program, error) {
	insns := append(before[:len(before):len(before)],
		asm.Mov.Imm(asm.R2, int32(slot)),
		asm.StoreMem(asm.R1, ctxSlot, asm.R2, asm.Word),
		asm.Mov.Imm(asm.R2, int32(claim)),
		asm.StoreMem(asm.R1, ctxClaim, asm.R2, asm.Word),
		asm.LoadMapPtr(asm.R2, calls.FD()),
		asm.Mov.Imm(asm.R3, int32(dir)),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, shot),
		asm.Return(),
	)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: pinEntries[dir], Type: ebpf.SchedCLS, License: "GPL", Instructions: insns,
	})
	if err != nil {
		return nil, fmt.Errorf("loading an agent's own program: %w", err)
	}
	return p, nil
}
