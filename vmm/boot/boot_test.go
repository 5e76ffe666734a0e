package boot

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func newMemory(t *testing.T, size uint64) *guestmem.Memory {
	t.Helper()
	m, err := guestmem.New(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// kernelELF returns an ELF executable with one segment.
func kernelELF(paddr, memsz uint64, data []byte) []byte {
	var b bytes.Buffer
	h := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: 1, Entry: paddr,
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1, Shentsize: 64,
	}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = 2, 1, 1
	binary.Write(&b, binary.LittleEndian, h)
	binary.Write(&b, binary.LittleEndian, elf.Prog64{
		Type: uint32(elf.PT_LOAD), Flags: 7, Off: 120, Vaddr: paddr, Paddr: paddr,
		Filesz: uint64(len(data)), Memsz: memsz, Align: 4096,
	})
	b.Write(data)
	return b.Bytes()
}

func bzImage(payload []byte) []byte {
	const sects = 2
	img := make([]byte, (sects+1)*512+0x100)
	img[hdrSetupSects] = sects
	binary.LittleEndian.PutUint16(img[hdrBootFlag:], 0xaa55)
	copy(img[hdrMagic:], "HdrS")
	binary.LittleEndian.PutUint16(img[hdrVersion:], 0x20f)
	binary.LittleEndian.PutUint32(img[hdrPayloadOffset:], 0x100)
	binary.LittleEndian.PutUint32(img[hdrPayloadLength:], uint32(len(payload)))
	return append(img, payload...)
}

func gzipped(p []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write(p)
	w.Close()
	return binary.LittleEndian.AppendUint32(b.Bytes(), uint32(len(p)))
}

func write(t *testing.T, p []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, p, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestKernels_of_both_forms_land_at_their_address(t *testing.T) {
	code := bytes.Repeat([]byte("kernel! "), 1000)
	image := kernelELF(0x1000000, 0x10000, code)
	for name, file := range map[string][]byte{"vmlinux": image, "bzImage": bzImage(gzipped(image))} {
		mem := newMemory(t, 64<<20)
		e, err := Load(mem, Config{Kernel: write(t, file), Cmdline: "quiet", VCPUs: 2, Seed: []byte("seed")})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if e.RIP != 0x1000000 || e.RSI != uint64(zeroPageAddr) {
			t.Errorf("%s: entry %+v", name, e)
		}
		got := make([]byte, len(code))
		if err := mem.Read(0x1000000, got); err != nil || !bytes.Equal(got, code) {
			t.Errorf("%s: the kernel's bytes are not at its address (%v)", name, err)
		}
		zp := make([]byte, 4096)
		if err := mem.Read(zeroPageAddr, zp); err != nil {
			t.Fatal(err)
		}
		cmd := make([]byte, 6)
		if err := mem.Read(guestmem.GPA(binary.LittleEndian.Uint32(zp[bpCmdline:])), cmd); err != nil || string(cmd) != "quiet\x00" {
			t.Errorf("%s: command line %q, %v", name, cmd, err)
		}
		seed := make([]byte, 20)
		if err := mem.Read(guestmem.GPA(binary.LittleEndian.Uint64(zp[bpSetupData:])), seed); err != nil || string(seed[16:]) != "seed" || seed[8] != setupRNGSeed {
			t.Errorf("%s: seed %q, %v", name, seed, err)
		}
	}
}

func TestUnbootable_files_are_refused_with_their_reason(t *testing.T) {
	good := kernelELF(0x1000000, 0x10000, []byte("code"))
	arm := bytes.Clone(good)
	arm[18] = byte(elf.EM_AARCH64)
	inside := kernelELF(0x1000000, 0x10000, []byte("code"))
	binary.LittleEndian.PutUint64(inside[24:], 0x2000000)
	old := bzImage(gzipped(good))
	binary.LittleEndian.PutUint16(old[hdrVersion:], 0x201)
	long := bzImage(gzipped(good))
	long = long[:len(long)-40]
	for _, tc := range []struct {
		name string
		file []byte
		want error
	}{
		{"empty file", nil, ErrNotKernel},
		{"text", []byte(strings.Repeat("not a kernel ", 100)), ErrNotKernel},
		{"truncated ELF header", good[:30], ErrNotKernel},
		{"ELF for another machine", arm, ErrNotKernel},
		{"entry outside of the segments", inside, ErrNotKernel},
		{"segment below 1 MiB", kernelELF(0x1000, 0x1000, []byte("x")), ErrNotKernel},
		{"segment beyond RAM", kernelELF(0x1000000, 1<<30, []byte("x")), ErrNoRoom},
		{"segment that wraps", kernelELF(^uint64(0)-4095, 0x10000, []byte("x")), ErrNoRoom},
		{"old boot protocol", old, ErrNotKernel},
		{"truncated bzImage", long, ErrNotKernel},
		{"unknown compression", bzImage([]byte("????????????????")), ErrNotKernel},
		{"payload that is no ELF", bzImage(gzipped([]byte(strings.Repeat("x", 100)))), ErrNotKernel},
		{"payload that claims gigabytes", bzImage(append(gzipped(good)[:60], 0xff, 0xff, 0xff, 0xff)), ErrNotKernel},
	} {
		_, err := Load(newMemory(t, 64<<20), Config{Kernel: write(t, tc.file), VCPUs: 1})
		if !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", tc.name, err, tc.want)
		}
	}
	if _, err := Load(newMemory(t, 64<<20), Config{Kernel: filepath.Join(t.TempDir(), "none"), VCPUs: 1}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing kernel: got %v", err)
	}
	// The header announces more bytes than the file has.
	short := write(t, good[:len(good)-2])
	if _, err := Load(newMemory(t, 64<<20), Config{Kernel: short, VCPUs: 1}); err == nil || !strings.Contains(err.Error(), "truncated") {
		t.Errorf("truncated segment: got %v", err)
	}
}

func TestCommand_lines_are_bounded_and_printable(t *testing.T) {
	k := write(t, kernelELF(0x1000000, 0x10000, []byte("code")))
	for name, cmdline := range map[string]string{
		"too long": strings.Repeat("x", MaxCmdline+1), "newline": "a\nb", "zero byte": "a\x00b",
	} {
		if _, err := Load(newMemory(t, 64<<20), Config{Kernel: k, Cmdline: cmdline, VCPUs: 1}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestInitramfs_lands_below_the_hole_and_must_fit(t *testing.T) {
	k := write(t, kernelELF(0x1000000, 0x10000, []byte("code")))
	initrd := bytes.Repeat([]byte("070701"), 100000)
	mem := newMemory(t, 4<<30)
	if _, err := Load(mem, Config{Kernel: k, Initramfs: write(t, initrd), VCPUs: 1}); err != nil {
		t.Fatal(err)
	}
	var zp [4096]byte
	if err := mem.Read(zeroPageAddr, zp[:]); err != nil {
		t.Fatal(err)
	}
	at := guestmem.GPA(binary.LittleEndian.Uint32(zp[bpRamdisk:]))
	if size := binary.LittleEndian.Uint32(zp[bpRamdiskSize:]); int(size) != len(initrd) || at+guestmem.GPA(size) > guestmem.HoleStart {
		t.Errorf("initramfs of %d bytes at %#x", size, at)
	}
	got := make([]byte, len(initrd))
	if err := mem.Read(at, got); err != nil || !bytes.Equal(got, initrd) {
		t.Errorf("its bytes are not there (%v)", err)
	}
	big := write(t, make([]byte, 50<<20))
	if _, err := Load(newMemory(t, 64<<20), Config{Kernel: k, Initramfs: big, VCPUs: 1}); !errors.Is(err, ErrNoRoom) {
		t.Errorf("50 MiB into 64 MiB of RAM: got %v, want ErrNoRoom", err)
	}
}

func TestE820_leaves_the_hole_out_and_covers_all_RAM(t *testing.T) {
	k := write(t, kernelELF(0x1000000, 0x10000, []byte("code")))
	for _, size := range []uint64{64 << 20, 3 << 30, 4 << 30, 16 << 30} {
		mem := newMemory(t, size)
		if _, err := Load(mem, Config{Kernel: k, VCPUs: 1}); err != nil {
			t.Fatal(err)
		}
		var zp [4096]byte
		if err := mem.Read(zeroPageAddr, zp[:]); err != nil {
			t.Fatal(err)
		}
		var ram, last uint64
		for i := range int(zp[bpE820Entries]) {
			e := zp[bpE820Table+20*i:]
			start, n, typ := binary.LittleEndian.Uint64(e), binary.LittleEndian.Uint64(e[8:]), binary.LittleEndian.Uint32(e[16:])
			if start < last {
				t.Errorf("%d MiB: entry %d overlaps the one before", size>>20, i)
			}
			last = start + n
			if typ == e820RAM {
				ram += n
				if start < uint64(guestmem.HoleEnd) && start+n > uint64(guestmem.HoleStart) {
					t.Errorf("%d MiB: RAM in the hole", size>>20)
				}
			}
		}
		if missing := size - ram; missing != uint64(highMemory-mpTableAddr) {
			t.Errorf("%d MiB: %#x bytes of RAM are not in the map", size>>20, missing)
		}
	}
}

// readTable reads an ACPI table and checks its checksum.
func readTable(t *testing.T, mem *guestmem.Memory, at guestmem.GPA, signature string) []byte {
	t.Helper()
	head := make([]byte, 36)
	if err := mem.Read(at, head); err != nil {
		t.Fatal(err)
	}
	if string(head[:4]) != signature {
		t.Fatalf("table at %#x is %q, want %q", at, head[:4], signature)
	}
	p := make([]byte, binary.LittleEndian.Uint32(head[4:]))
	if err := mem.Read(at, p); err != nil {
		t.Fatal(err)
	}
	if checksum(p) != 0 {
		t.Errorf("%s has a bad checksum", signature)
	}
	return p
}

func TestACPI_tables_link_up_and_sum_to_zero(t *testing.T) {
	k := write(t, kernelELF(0x1000000, 0x10000, []byte("code")))
	mem := newMemory(t, 64<<20)
	c := Config{Kernel: k, VCPUs: 8, Hardware: Hardware{
		SerialPort: 0x3f8, SerialGSI: 4, ResetPort: 0x600, ResetValue: 1, SleepPort: 0x604, PvpanicPort: 0x505,
		GenerationID: GenerationIDAddr, EventGSI: 23,
	}}
	for i := range 18 {
		c.Devices = append(c.Devices, VirtioMMIO{Base: MMIOBase + guestmem.GPA(i)*MMIOStride, Size: MMIOStride, GSI: uint32(5 + i)})
	}
	if _, err := Load(mem, c); err != nil {
		t.Fatal(err)
	}
	rsdp := make([]byte, 36)
	if err := mem.Read(acpiAddr, rsdp); err != nil {
		t.Fatal(err)
	}
	if string(rsdp[:8]) != "RSD PTR " || checksum(rsdp[:20]) != 0 || checksum(rsdp) != 0 {
		t.Errorf("bad RSDP % x", rsdp)
	}
	xsdt := readTable(t, mem, guestmem.GPA(binary.LittleEndian.Uint64(rsdp[24:])), "XSDT")
	fadt := readTable(t, mem, guestmem.GPA(binary.LittleEndian.Uint64(xsdt[36:])), "FACP")
	madt := readTable(t, mem, guestmem.GPA(binary.LittleEndian.Uint64(xsdt[44:])), "APIC")
	dsdt := readTable(t, mem, guestmem.GPA(binary.LittleEndian.Uint64(fadt[140:])), "DSDT")
	if n := bytes.Count(dsdt, []byte("LNRO0005")); n != 18 {
		t.Errorf("the DSDT has %d virtio devices, want 18", n)
	}
	if len(madt) != 36+8+8*8+12+6 {
		t.Errorf("MADT of %d bytes", len(madt))
	}
	if fadt[116+8-4] != 0 || binary.LittleEndian.Uint64(fadt[120:]) != 0x600 {
		t.Errorf("reset register % x", fadt[116:128])
	}
}

func TestMP_table_sums_to_zero(t *testing.T) {
	mem := newMemory(t, 64<<20)
	if err := writeMPTable(mem, 8); err != nil {
		t.Fatal(err)
	}
	fp := make([]byte, 16)
	if err := mem.Read(mpTableAddr, fp); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 44)
	if err := mem.Read(guestmem.GPA(binary.LittleEndian.Uint32(fp[4:])), head); err != nil {
		t.Fatal(err)
	}
	table := make([]byte, binary.LittleEndian.Uint16(head[4:]))
	if err := mem.Read(mpTableAddr+16, table); err != nil {
		t.Fatal(err)
	}
	if checksum(fp) != 0 || checksum(table) != 0 {
		t.Error("bad checksum")
	}
	if end := mpTableAddr + 16 + guestmem.GPA(len(table)); end > ebdaEnd {
		t.Errorf("the table ends at %#x", end)
	}
}

func FuzzUnpackBzImage(f *testing.F) {
	f.Add(bzImage(gzipped(kernelELF(0x1000000, 0x1000, []byte("code")))))
	f.Add(bzImage([]byte{0x28, 0xb5, 0x2f, 0xfd, 0, 0, 0, 0, 8, 0, 0, 0}))
	f.Fuzz(func(t *testing.T, p []byte) {
		if len(p) > 1<<16 {
			t.Skip("larger than it needs to be")
		}
		UnpackBzImage(p)
	})
}

// Made with xz --check=crc32 --x86 --lzma2=dict=1MiB, as scripts/xz_wrap.sh packs kernels.
func TestPayload_of_xz_with_the_filter_for_X86_is_unpacked(t *testing.T) {
	const want = "\x7fELF and what follows it, so that a payload is not only zeros"
	payload, err := hex.DecodeString("fd377a585a0000016922de3602010400210110008b216f4901003c7f454c4620616e64207768617420666f6c6c6f7773" +
		"2069742c20736f20746861742061207061796c6f6164206973206e6f74206f6e6c79207a65726f73000000003b77929d0001513d2f954edb9042990d010000000001595a")
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := UnpackBzImage(bzImage(binary.LittleEndian.AppendUint32(payload, uint32(len(want)))))
	if err != nil || string(got) != want {
		t.Errorf("got %q (%v)", got, err)
	}
}
