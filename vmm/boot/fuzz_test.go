package boot

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

const fuzzRAM = 64 << 20

// touched returns the pages written to since the last call.
func touched(mem *guestmem.Memory) (pages []guestmem.GPA) {
	mem.TakeDirty(func(page uint64) { pages = append(pages, guestmem.GPA(page*guestmem.PageSize)) })
	return pages
}

// cheap reports whether a file can be tried quickly: it is no bzImage, or has a small payload that is unpacked or
// packed with gzip. The other packers allocate megabytes first.
func cheap(image []byte) bool {
	if len(image) < hdrEnd || string(image[hdrMagic:hdrMagic+4]) != "HdrS" || bytes.HasPrefix(image, []byte(elf.ELFMAG)) {
		return true
	}
	if binary.LittleEndian.Uint32(image[len(image)-4:]) > 1<<20 {
		return false
	}
	for _, packer := range []string{"\xfd7zXZ", "\x28\xb5\x2f\xfd", "\x02\x21\x4c\x18", "BZh", "\x5d\x00\x00"} {
		if bytes.Contains(image, []byte(packer)) {
			return false
		}
	}
	return true
}

// A file is either loaded as its segments say, in RAM above the first megabyte, or refused with ErrNotKernel or
// ErrNoRoom. A refusal leaves RAM unchanged.
func FuzzLoadKernel(f *testing.F) {
	good := kernelELF(0x100000, 0x2000, []byte("code"))
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add(bzImage(gzipped(good)))
	f.Add(bzImage(append(bytes.Clone(good), 0, 0, 0, 0)))
	f.Add(kernelELF(fuzzRAM-4096, 4097, []byte("code")))
	f.Add(kernelELF(^uint64(0)-4095, 8192, []byte("code")))
	// In memory, because a file system may write out each file that replaces another.
	fd, err := unix.MemfdCreate("kernel", unix.MFD_CLOEXEC)
	if err != nil {
		f.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "kernel")
	f.Cleanup(func() { file.Close() })
	path := fmt.Sprintf("/proc/self/fd/%d", fd)
	mem, err := guestmem.New(fuzzRAM)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { mem.Close() })
	f.Fuzz(func(t *testing.T, image []byte) {
		const most = 64 << 10
		if len(image) > most || !cheap(image) {
			return
		}
		_, err := file.WriteAt(image, 0)
		if err := errors.Join(err, file.Truncate(int64(len(image)))); err != nil {
			t.Fatal(err)
		}
		l, err := loadKernel(mem, path, os.Open)
		if err != nil {
			if !errors.Is(err, ErrNotKernel) && !errors.Is(err, ErrNoRoom) {
				t.Fatalf("refused with %v: neither ErrNotKernel nor ErrNoRoom", err)
			}
			if pages := touched(mem); pages != nil {
				t.Fatalf("refused, and RAM has some of it at %#x: %v", pages, err)
			}
			return
		}
		if l.entry < highMemory || l.entry >= l.end || l.end > fuzzRAM {
			t.Fatalf("entry %#x, end %#x of a guest of %#x", l.entry, l.end, fuzzRAM)
		}
		for _, page := range touched(mem) {
			if page < highMemory || page >= l.end {
				t.Fatalf("bytes at %#x, outside of all segments", page)
			}
		}
		if l.header != nil {
			return
		}
		e, err := elf.NewFile(bytes.NewReader(image))
		if err != nil {
			t.Fatal(err)
		}
		// The last segment was written over the others.
		var last *elf.Prog
		for _, p := range e.Progs {
			if p.Type == elf.PT_LOAD && p.Memsz > 0 {
				last = p
			}
		}
		got := make([]byte, last.Filesz)
		if err := mem.Read(guestmem.GPA(last.Paddr), got); err != nil || !bytes.Equal(got, image[last.Off:last.Off+last.Filesz]) {
			t.Fatalf("a segment is not what the file has (%v)", err)
		}
	})
}

// twoSegments returns a kernel whose second segment change has edited.
func twoSegments(change func(*elf.Prog64)) []byte {
	image := kernelELF(0x200000, 0x1000, make([]byte, 56))
	binary.LittleEndian.PutUint16(image[56:], 2) // Phnum
	second := elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: 7, Off: 0, Vaddr: 0x300000, Paddr: 0x300000, Filesz: 16, Memsz: 16, Align: 4096}
	change(&second)
	var b bytes.Buffer
	if err := binary.Write(&b, binary.LittleEndian, second); err != nil {
		panic(err)
	}
	copy(image[120:], b.Bytes())
	return image
}

func TestAttack_kernel_with_one_bad_segment_leaves_nothing_in_RAM(t *testing.T) {
	for name, change := range map[string]func(*elf.Prog64){
		"beyond the file":   func(p *elf.Prog64) { p.Off = 1 << 20 },
		"longer than it is": func(p *elf.Prog64) { p.Filesz, p.Memsz = 1<<16, 1<<16 },
		"an offset of -1":   func(p *elf.Prog64) { p.Off = 1<<63 - 1 },
		"beyond RAM":        func(p *elf.Prog64) { p.Paddr = fuzzRAM },
		"in low memory":     func(p *elf.Prog64) { p.Paddr = 0x1000 },
		"longer in file":    func(p *elf.Prog64) { p.Memsz = 15 },
	} {
		mem := newMemory(t, fuzzRAM)
		_, err := loadKernel(mem, write(t, twoSegments(change)), os.Open)
		if !errors.Is(err, ErrNotKernel) && !errors.Is(err, ErrNoRoom) {
			t.Errorf("%s: got %v, want ErrNotKernel or ErrNoRoom", name, err)
		}
		if pages := touched(mem); pages != nil {
			t.Errorf("%s: the first segment is in RAM, at %#x", name, pages)
		}
	}
}

func TestAttack_kernel_whose_segments_are_the_same_bytes_many_times_is_refused(t *testing.T) {
	const segments, data = 1000, 1 << 20
	p := elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: 7, Off: 0, Vaddr: 0x100000, Paddr: 0x100000, Filesz: data, Memsz: data, Align: 4096}
	image := bytes.NewBuffer(kernelELF(0x100000, data, nil)[:64])
	for range segments {
		if err := binary.Write(image, binary.LittleEndian, p); err != nil {
			t.Fatal(err)
		}
	}
	file := append(image.Bytes(), make([]byte, data)...)
	binary.LittleEndian.PutUint16(file[56:], segments)
	mem := newMemory(t, fuzzRAM)
	if _, err := loadKernel(mem, write(t, file), os.Open); !errors.Is(err, ErrNotKernel) {
		t.Errorf("got %v, want ErrNotKernel", err)
	}
	if pages := touched(mem); pages != nil {
		t.Errorf("it is in RAM, at %#x", pages)
	}
}

func TestAttack_kernel_that_lies_about_what_it_unpacks_to_takes_no_memory_for_it(t *testing.T) {
	payload := gzipped(kernelELF(0x100000, 0x1000, []byte("code")))
	binary.LittleEndian.PutUint32(payload[len(payload)-4:], maxKernel)
	image := bzImage(payload)
	r := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, _, err := UnpackBzImage(image); err == nil {
				b.Fatal("accepted")
			}
		}
	})
	if got := r.AllocedBytesPerOp(); got > 1<<20 {
		t.Errorf("%d bytes for a file of %d", got, len(image))
	}
}
