package bench

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/drowse-vm/drowse/devices/reset"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The measured program: where it lies, how much RAM it has, and where its data and the end of its stack are.
const (
	loopRAM          = guestmem.MinSize
	loopAt           = 0x1000000
	loopData         = loopAt + 0x80000
	loopStack        = loopAt + 0xf0000
	loopSize         = 1 << 20
	loopFirst        = 1000
	loopMost         = 1 << 30
	loopLeast        = 20 * time.Millisecond // shortest run: entering and leaving the guest is well below 1% of it
	loopGrowth       = 8
	loopInstructions = 13 // in a turn of loopMixed
	loopRegisters    = 6  // in a turn without memory
)

// inPico records picoseconds: an instruction takes less than a nanosecond.
var inPico = unit{"ns", thousandths}

// turn is one turn of a loop, with its number of instructions.
type turn struct {
	mix          string
	code         []byte
	call         int // the end of a call in code, 0 for none
	instructions int64
}

// turns are the measured loops. Half of the mixed one's instructions touch memory, like about half of a kernel's.
var turns = []turn{
	{mix: "registers", instructions: loopRegisters, code: []byte{
		0x48, 0x01, 0xc8, // add rax,rcx
		0x48, 0x31, 0xc2, // xor rdx,rax
		0x48, 0x85, 0xc0, // test rax,rax
		0x48, 0x8d, 0x50, 0x04, // lea rdx,[rax+4]
	}},
	{mix: "mixed", instructions: loopInstructions, call: 23, code: []byte{
		0x48, 0x8b, 0x03, // mov rax,[rbx]
		0x48, 0x01, 0xc8, // add rax,rcx
		0x48, 0x89, 0x43, 0x08, // mov [rbx+8],rax
		0x48, 0x85, 0xc0, // test rax,rax
		0x48, 0x8d, 0x50, 0x04, // lea rdx,[rax+4]
		0x52,             // push rdx
		0xe8, 0, 0, 0, 0, // call the end
		0x5a,                      // pop rdx
		0x81, 0xe2, 0xff, 0, 0, 0, // and edx,0xff
	}},
}

// program returns a loop of count turns, up to loopMost, that then powers the machine off.
func (t turn) program(count uint32) []byte {
	le := binary.LittleEndian
	code := le.AppendUint32([]byte{0x48, 0xc7, 0xc4}, loopStack)             // mov rsp,loopStack
	code = le.AppendUint32(append(code, 0x48, 0xc7, 0xc3), loopData)         // mov rbx,loopData
	code = le.AppendUint32(append(code, 0xb9), count)                        // mov ecx,count
	begin := len(code)                                                       //
	code = append(append(code, t.code...), 0xff, 0xc9)                       // dec ecx
	code = append(code, 0x75, byte(begin-len(code)-2))                       // jnz begin
	code = le.AppendUint16(append(code, 0x66, 0xba), reset.SleepControlPort) // mov dx,port
	// SLP_EN and the type for S5 (ACPI 6.4, 4.8.3.7).
	code = append(code, 0xb0, 1<<5|reset.SleepTypeOff<<2, 0xee, 0xeb, 0xfe) // mov al,value; out dx,al; jmp to itself
	if t.call > 0 {
		end := begin + t.call
		le.PutUint32(code[end-4:], uint32(len(code)-end))
		code = append(code, 0x31, 0xd2, 0xc3) // xor edx,edx; ret
	}
	return code
}

// kernelOf returns an ELF file for a program that begins in 64-bit mode.
func kernelOf(code []byte) ([]byte, error) {
	const header, segment = 64, 56
	h := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT), Entry: loopAt,
		Phoff: header, Ehsize: header, Phentsize: segment, Phnum: 1, Shentsize: 64,
	}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)
	p := elf.Prog64{
		Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W | elf.PF_X), Off: header + segment, Vaddr: loopAt, Paddr: loopAt,
		Filesz: uint64(len(code)), Memsz: loopSize, Align: 4096,
	}
	var b bytes.Buffer
	err := errors.Join(binary.Write(&b, binary.LittleEndian, h), binary.Write(&b, binary.LittleEndian, p))
	b.Write(code)
	return b.Bytes(), err
}

// Instructions measures an instruction of a guest at its highest privilege, in 64-bit mode. guest_instruction is
// the time of a loop divided by the number of its instructions. The time goes from the first KVM_RUN until this
// process knows that the guest has switched itself off. mix names the loop. A KVM without virtualisation hardware
// interprets the instructions (KVM counts them in faults: emulated), so a guest's kernel pays this much for each.
func Instructions(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	dir, err := runsDir()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, t := range turns {
		s := newSeries(inPico)
		count := uint32(loopFirst)
		for i := 0; i < o.Warmup+o.N; {
			took, emulated, err := t.run(ctx, filepath.Join(dir, "kernel"), count)
			if err != nil {
				return nil, fmt.Errorf("running a loop in a guest: %w", err)
			}
			if took < loopLeast && count < loopMost/loopGrowth {
				count *= loopGrowth
				s, i = newSeries(inPico), 0
				continue
			}
			if i++; i <= o.Warmup {
				continue
			}
			s.add(max(1, took.Nanoseconds()*thousandths/(int64(count)*t.instructions)))
			s.fault("emulated", emulated)
		}
		row := s.row("guest_instruction", map[string]any{"mix": t.mix})
		e.say("guest_instruction: %s: %.3g ns", t.mix, row.P50)
		rows = append(rows, row)
	}
	return rows, nil
}

// run runs the loop once in a machine of its own.
func (t turn) run(ctx context.Context, path string, count uint32) (took time.Duration, emulated int64, err error) {
	file, err := kernelOf(t.program(count))
	if err != nil {
		return 0, 0, err
	}
	if err := os.WriteFile(path, file, 0o600); err != nil {
		return 0, 0, err
	}
	mem, err := guestmem.New(loopRAM)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	prebuilt, err := vmm.NewPrebuilt(vmm.PrebuiltConfig{VCPUs: 1, Memory: mem})
	if err != nil {
		return 0, 0, err
	}
	m, err := vmm.New(prebuilt, vmm.Config{})
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err := errors.Join(m.Boot(vmm.BootOptions{Kernel: path}), m.Start()); err != nil {
		return 0, 0, err
	}
	exit, err := m.Wait(ctx)
	end := time.Now()
	if err != nil {
		return 0, 0, err
	}
	if exit.Reason != vmm.PoweredOff {
		return 0, 0, fmt.Errorf("the guest has ended in another way: %v", exit)
	}
	// Not every host counts emulated instructions.
	stats, _ := m.KVMStats()
	return end.Sub(m.Stages().Entry()), int64(stats["insn_emulation"]), nil
}
