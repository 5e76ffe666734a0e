package bpf

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Linux 6.1 allows the functions of a call chain 512 bytes of stack in all, each rounded up to 32 and at least 32
// (check_max_stack_depth in kernel/bpf/verifier.c). Later kernels count less, and so do not notice a program that is
// too deep.
const (
	maxStack   = 512
	stackAlign = 32
)

func TestPrograms_deepest_chain_of_calls_fits_the_stack_of_Linux_6_1(t *testing.T) {
	spec, err := LoadEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range spec.Programs {
		depth := deepest(t, p)
		t.Logf("%s: %d bytes", name, depth)
		if depth > maxStack {
			t.Errorf("%s: the deepest chain of calls has %d bytes of stack, more than %d", name, depth, maxStack)
		}
		if depth < maxStack/4 && name != "to_waker" { // it calls nothing
			t.Errorf("%s: the deepest chain of calls has %d bytes of stack: the calls were not followed", name, depth)
		}
	}
}

// deepest returns the stack bytes of a program's deepest call chain.
func deepest(t *testing.T, p *ebpf.ProgramSpec) int {
	t.Helper()
	frames, calls := map[string]int{}, map[string]map[string]bool{}
	at := ""
	for i, ins := range p.Instructions {
		if s := ins.Symbol(); s != "" && (i == 0 || ebpfFunction(p, s)) {
			at = s
			frames[at], calls[at] = stackAlign, map[string]bool{}
		}
		used := 0
		switch class := ins.OpCode.Class(); {
		case class.IsStore() && ins.Dst == asm.RFP, class == asm.LdXClass && ins.Src == asm.RFP:
			used = -int(ins.Offset)
		case class.IsALU() && i > 0 && ins.OpCode.ALUOp() == asm.Add && movedFrame(p.Instructions[i-1], ins.Dst):
			used = -int(ins.Constant)
		}
		frames[at] = max(frames[at], (used+stackAlign-1)/stackAlign*stackAlign)
		if ins.IsFunctionCall() || ins.IsFunctionReference() {
			calls[at][ins.Reference()] = true
		}
	}
	var depth func(string) int
	depth = func(f string) int {
		most := 0
		for c := range calls[f] {
			if _, ok := frames[c]; !ok {
				t.Fatalf("%s calls %s, which is not in the program", f, c)
			}
			most = max(most, depth(c))
		}
		return frames[f] + most
	}
	return depth(p.Instructions[0].Symbol())
}

// ebpfFunction reports whether a symbol names a function, not a place in one.
func ebpfFunction(p *ebpf.ProgramSpec, symbol string) bool {
	for _, ins := range p.Instructions {
		if (ins.IsFunctionCall() || ins.IsFunctionReference()) && ins.Reference() == symbol {
			return true
		}
	}
	return false
}

// movedFrame reports whether an instruction copies the frame's address to a register.
func movedFrame(ins asm.Instruction, to asm.Register) bool {
	return ins.OpCode.Class().IsALU() && ins.OpCode.ALUOp() == asm.Mov && ins.Src == asm.RFP && ins.Dst == to
}
