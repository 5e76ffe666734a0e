package bench

import (
	"errors"
	"testing"

	"golang.org/x/arch/x86/x86asm"

	"github.com/drowse-vm/drowse/vmm/kvm"
)

// A turn is one pass of the loop and of what it calls. It must have the number of instructions that it claims.
func TestTurns_have_as_many_instructions_as_they_say(t *testing.T) {
	for _, turn := range turns {
		code := turn.program(7)
		var starts []int
		at := map[int]x86asm.Inst{}
		for pos := 0; pos < len(code); {
			in, err := x86asm.Decode(code[pos:], 64)
			if err != nil {
				t.Fatalf("%s: at %d: %v", turn.mix, pos, err)
			}
			at[pos] = in
			starts = append(starts, pos)
			pos += in.Len
		}
		// Walk from the loop's first instruction to its jump back.
		begin := starts[3]
		var count int64
		var back []int
		for pos := begin; ; {
			in := at[pos]
			if in.Len == 0 || count > 100 {
				t.Fatalf("%s: nothing begins at %d", turn.mix, pos)
			}
			count++
			next := pos + in.Len
			if in.Op == x86asm.JNE {
				if to := next + int(in.Args[0].(x86asm.Rel)); to != begin {
					t.Errorf("%s: the loop goes back to %d, not %d", turn.mix, to, begin)
				}
				break
			}
			switch in.Op {
			case x86asm.CALL:
				back = append(back, next)
				next += int(in.Args[0].(x86asm.Rel))
			case x86asm.RET:
				next, back = back[len(back)-1], back[:len(back)-1]
			}
			pos = next
		}
		if count != turn.instructions {
			t.Errorf("%s: %d instructions in a turn, and it says %d", turn.mix, count, turn.instructions)
		}
	}
}

func TestInstructions_gives_a_row_for_each_mix(t *testing.T) {
	sys, err := kvm.Open()
	if err != nil {
		if !errors.Is(err, kvm.ErrNoKVM) {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	sys.Close()
	rows, err := Instructions(t.Context(), Env{}, Options{N: 2, Warmup: 1})
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != len(turns) {
		t.Fatalf("%d rows", len(rows))
	}
	for _, r := range rows {
		if r.Unit != "ns" || r.N != 2 || r.P50 <= 0 {
			t.Errorf("%+v", r)
		}
		t.Log(r.Params, r.P50, r.Faults)
	}
}
