package vmm

import (
	"slices"
	"testing"
	"time"
)

// inKernelHalf maps RAM at 0xffffffff80000000 too, jumps there, pushes that address and its own, and loops.
var inKernelHalf = []byte{
	0x48, 0x8b, 0x04, 0x25, 0x00, 0x90, 0x00, 0x00, // mov rax,[0x9000]: the first entry of the uppermost table
	0x48, 0x89, 0x04, 0x25, 0xf8, 0x9f, 0x00, 0x00, // mov [0x9ff8],rax: the last one
	0x48, 0x8b, 0x04, 0x25, 0x00, 0xa0, 0x00, 0x00, // mov rax,[0xa000]
	0x48, 0x89, 0x04, 0x25, 0xf0, 0xaf, 0x00, 0x00, // mov [0xaff0],rax: the last but one
	0x48, 0xc7, 0xc3, 0x00, 0x00, 0x00, 0x80, // mov rbx,-2 GiB
	0x48, 0x8d, 0xa3, 0x00, 0x00, 0x10, 0x02, // lea rsp,[rbx+33 MiB]
	0x48, 0x8d, 0x05, 0x05, 0x00, 0x00, 0x00, // lea rax,[rip+5]
	0x48, 0x01, 0xd8, // add rax,rbx
	0xff, 0xe0, // jmp rax
	0x53,       // push rbx
	0x50,       // push rax
	0xeb, 0xfe, // jmp to itself
}

func TestSample_of_a_kernel_has_the_words_of_its_stack(t *testing.T) {
	m := newMachine(t, testConfig{})
	start(t, m, inKernelHalf...)
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		s, ok := m.Sample(0)
		if !ok {
			t.Fatal("the machine does not run")
		}
		const loop = 2 // its distance from the first push
		if s.RIP >= kernelHalf && len(s.Stack) == 2 {
			if want := []uint64{s.RIP - loop, kernelCode}; !slices.Equal(s.Stack, want) {
				t.Errorf("the stack has %#x, want %#x", s.Stack, want)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the last look: %+v", s)
		}
	}
	if m.VCPUTime(0) <= 0 {
		t.Error("it took no processor time")
	}
}

func TestSample_of_a_program_has_no_stack_and_that_of_a_paused_machine_is_none(t *testing.T) {
	m := newMachine(t, testConfig{})
	start(t, m, loop...)
	if err := m.WaitEntry(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s, ok := m.Sample(0); !ok || s.RIP == 0 || s.RIP >= kernelHalf || s.Stack != nil {
		t.Errorf("got %+v, %v", s, ok)
	}
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s, ok := m.Sample(0); ok {
		t.Errorf("got %+v of a paused machine", s)
	}
}
