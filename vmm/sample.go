package vmm

import (
	"encoding/binary"
	"time"

	"github.com/drowse-vm/drowse/vmm/guestmem"
	"github.com/drowse-vm/drowse/vmm/kvm"
)

// Sample says where a vCPU was.
type Sample struct {
	// RIP is its instruction pointer.
	RIP uint64
	// Stack are words of the kernel's stack that may be return addresses, those of the innermost calls first: at most
	// maxSampled. Some are left over from calls that have ended. Nil while a program ran.
	Stack []uint64
}

const (
	// maxSampled bounds Sample.Stack.
	maxSampled = 64
	// stackSize is that of a thread of the kernel, THREAD_SIZE of Linux for x86-64, which also aligns stacks to it.
	stackSize = 16 << 10
	// kernelHalf is where a kernel's half of the addresses begins, and kernelCode where its code does (Linux,
	// Documentation/x86/x86_64/mm.rst).
	kernelHalf = 1 << 63
	kernelCode = 0xffffffff80000000
)

// VCPUTime returns the processor time of a vCPU's thread, in the guest and in KVM; 0 before it has begun.
func (m *Machine) VCPUTime(vcpu int) time.Duration {
	if tid := m.cpus[vcpu].tid.Load(); tid != 0 {
		return threadTime(int(tid))
	}
	return 0
}

// Sample calls a vCPU out of the guest, and says where it was: with VCPUTime, a profile of the guest. It returns false
// if the machine does not run.
func (m *Machine) Sample(vcpu int) (Sample, bool) {
	s := m.look(m.cpus[vcpu], true)
	if s == nil {
		return Sample{}, false
	}
	return Sample{RIP: s.rip, Stack: s.stack}, true
}

// kernelStack returns Sample.Stack. It runs on the vCPU's thread, outside the guest.
func (m *Machine) kernelStack(c *kvm.VCPU, rip, rsp uint64) (words []uint64) {
	if rip < kernelHalf || rsp < kernelHalf {
		return nil
	}
	var page [guestmem.PageSize]byte
	end := rsp&^(stackSize-1) + stackSize
	for at := rsp &^ 7; at < end && at >= kernelHalf; {
		gpa, ok := c.Translate(at)
		part := page[:min(end-at, guestmem.PageSize-at%guestmem.PageSize)]
		if !ok || m.mem.Read(guestmem.GPA(gpa), part) != nil {
			break
		}
		for ; len(part) >= 8; part = part[8:] {
			if w := binary.LittleEndian.Uint64(part); w >= kernelCode {
				if words = append(words, w); len(words) == maxSampled {
					return words
				}
			}
			at += 8
		}
	}
	return words
}
