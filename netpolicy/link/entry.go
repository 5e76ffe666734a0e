package link

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Offsets in struct __sk_buff that an endpoint's own program uses: its scratch space, of which bpf/endpoint.c
// reads the first three words.
const (
	ctxSlot  = 48 // cb[0]
	ctxClaim = 52 // cb[1]
	ctxWhich = 56 // cb[2]
)

// shot is TC_ACT_SHOT: the kernel drops the packet.
const shot = 2

const (
	// runsAt is the index of the counters of runs in an endpoint's map of counters, by table: begun, and ended 8
	// bytes behind. bpf/endpoint.c counts the latter.
	runsAt = 2 * 3 * netpolicy.Reasons
	// noTable is the table of a packet that met a swap at each of beginTries attempts. It is denied.
	noTable    = 2
	beginTries = 4
)

// entry loads an endpoint's own program for one direction, the one on its device. It passes the endpoint's slot
// and claim and the index of the table that judges the packet to the program of the host, by a tail call. If the
// host's program is missing, it drops the packet.
//
// Before it uses a table it counts a run by that table, and checks once more that the table is in force. So after
// a swap, once as many runs have ended as begun, no packet is judged by the old table any more. The addition has a
// full barrier (BPF_FETCH), so that the second check cannot come before it.
func (e *engine) entry(calls *ebpf.Map, dir int, before ...asm.Instruction) (*ebpf.Program, error) {
	return e.pausedEntry(calls, dir, before, nil)
}

// pausedEntry is entry with instructions before it, and between the choice of the table and its use. They must not
// change R6 to R9.
func (e *engine) pausedEntry(calls *ebpf.Map, dir int, before, pause asm.Instructions) (*ebpf.Program, error) {
	insns := append(before[:len(before):len(before)],
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMapValue(asm.R7, e.current.FD(), 0),
		asm.LoadMem(asm.R8, asm.R7, 0, asm.Word),
	)
	for range beginTries {
		insns = append(insns,
			asm.And.Imm(asm.R8, 1),
			asm.Mov.Reg(asm.R1, asm.R8),
			asm.Add.Imm(asm.R1, runsAt),
			asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
			asm.LoadMapPtr(asm.R1, e.counts.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "drop"),
			asm.Mov.Reg(asm.R9, asm.R0),
			asm.Mov.Imm(asm.R1, 1),
			asm.FetchAdd.Mem(asm.R9, asm.R1, asm.DWord, 0),
			asm.LoadMem(asm.R1, asm.R7, 0, asm.Word),
			asm.And.Imm(asm.R1, 1),
			asm.JEq.Reg(asm.R1, asm.R8, "judge"),
			// The other table is in force: undo the count.
			asm.Mov.Reg(asm.R8, asm.R1),
			asm.Mov.Imm(asm.R1, 1),
			asm.AddAtomic.Mem(asm.R9, asm.R1, asm.DWord, 8),
		)
	}
	insns = append(insns, asm.Mov.Imm(asm.R8, noTable))
	judge := append(pause[:len(pause):len(pause)],
		asm.Mov.Imm(asm.R2, int32(e.place.slot)),
		asm.StoreMem(asm.R6, ctxSlot, asm.R2, asm.Word),
		asm.Mov.Imm(asm.R2, int32(e.place.claim)),
		asm.StoreMem(asm.R6, ctxClaim, asm.R2, asm.Word),
		asm.StoreMem(asm.R6, ctxWhich, asm.R8, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, calls.FD()),
		asm.Mov.Imm(asm.R3, int32(dir)),
		asm.FnTailCall.Call(),
		// The tail call failed: the host's program is missing.
		asm.JEq.Imm(asm.R8, noTable, "drop"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R9, asm.R1, asm.DWord, 8),
	)
	judge[0] = judge[0].WithSymbol("judge")
	insns = append(insns, judge...)
	insns = append(insns, asm.Mov.Imm(asm.R0, shot).WithSymbol("drop"), asm.Return())
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: entryNames[dir], Type: ebpf.SchedCLS, License: "GPL", Instructions: insns,
	})
	if err != nil {
		return nil, fmt.Errorf("loading an endpoint's own program: %w", err)
	}
	return p, nil
}
