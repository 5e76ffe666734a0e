package boot

import (
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"
	"github.com/mikelolasagasti/xz"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz/lzma"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The reasons why a file cannot be booted.
var (
	ErrNotKernel = errors.New("not an x86-64 Linux kernel")
	ErrNoRoom    = errors.New("does not fit into the guest's memory")
)

// maxKernel bounds a kernel image, packed or not, in bytes.
const maxKernel = 512 << 20

// loaded says where a kernel image is in RAM.
type loaded struct {
	entry guestmem.GPA
	end   guestmem.GPA
	// header is the setup header of a bzImage, from offset 0x1f1; nil for ELF.
	header []byte
}

// loadKernel loads the kernel at path into RAM: an ELF vmlinux, or a bzImage. It unpacks the payload of a bzImage,
// which would take seconds in the guest.
func loadKernel(mem *guestmem.Memory, path string, open func(string) (*os.File, error)) (loaded, error) {
	f, err := open(path)
	if err != nil {
		return loaded{}, fmt.Errorf("opening the kernel: %w: build one with kernel.Build or name another", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return loaded{}, fmt.Errorf("opening the kernel: %w", err)
	}
	var magic [4]byte
	if _, err := f.ReadAt(magic[:], 0); err != nil || !st.Mode().IsRegular() || st.Size() > maxKernel {
		return loaded{}, notKernel(path, "it is too short, too long, or no regular file")
	}
	if string(magic[:]) == elf.ELFMAG {
		return loadELF(mem, path, f, st.Size(), f)
	}
	image := make([]byte, st.Size())
	if _, err := io.ReadFull(f, image); err != nil {
		return loaded{}, fmt.Errorf("reading the kernel %s: %w", path, err)
	}
	vmlinux, header, err := UnpackBzImage(image)
	if err != nil {
		return loaded{}, notKernel(path, err.Error())
	}
	l, err := loadELF(mem, path, bytes.NewReader(vmlinux), int64(len(vmlinux)), nil)
	l.header = header
	return l, err
}

func notKernel(path, why string) error {
	return fmt.Errorf("kernel %s: %w: %s: give an ELF vmlinux or a bzImage for x86-64", path, ErrNotKernel, why)
}

// maxSegments bounds the PT_LOAD segments of a kernel; Linux has five.
const maxSegments = 64

// loadELF copies the PT_LOAD segments to their physical addresses, once it has checked all of them. If file is not
// nil the bytes go straight from it into the guest. size is the number of bytes of r.
func loadELF(mem *guestmem.Memory, path string, r io.ReaderAt, size int64, file *os.File) (loaded, error) {
	e, err := elf.NewFile(r)
	if err != nil {
		return loaded{}, notKernel(path, err.Error())
	}
	defer e.Close()
	if e.Machine != elf.EM_X86_64 || e.Class != elf.ELFCLASS64 || e.Type != elf.ET_EXEC {
		return loaded{}, notKernel(path, fmt.Sprintf("it is an ELF %v for %v", e.Type, e.Machine))
	}
	l := loaded{entry: guestmem.GPA(e.Entry)}
	var segments []*elf.Prog
	var total uint64
	for _, p := range e.Progs {
		if p.Type != elf.PT_LOAD || p.Memsz == 0 {
			continue
		}
		at := guestmem.GPA(p.Paddr)
		if p.Filesz > p.Memsz || at < highMemory {
			return loaded{}, notKernel(path, fmt.Sprintf("segment of %d bytes at %#x", p.Memsz, p.Paddr))
		}
		if !mem.Contains(at, p.Memsz) {
			return loaded{}, fmt.Errorf("kernel %s: %w: it needs %d MiB, the guest has %d: give it more memory",
				path, ErrNoRoom, (p.Paddr+p.Memsz)>>20, mem.Size()>>20)
		}
		if p.Off > uint64(size) || p.Filesz > uint64(size)-p.Off {
			return loaded{}, notKernel(path, fmt.Sprintf("its segment at %#x reaches beyond the file: it is truncated", p.Paddr))
		}
		// All segments could name the same bytes of the file.
		if total += p.Filesz; total > maxKernel || len(segments) == maxSegments {
			return loaded{}, notKernel(path, fmt.Sprintf("more than %d segments, or of more than %d MiB", maxSegments, maxKernel>>20))
		}
		segments = append(segments, p)
		l.end = max(l.end, at+guestmem.GPA(p.Memsz))
	}
	if l.end == 0 || l.entry < highMemory || l.entry >= l.end {
		return loaded{}, notKernel(path, fmt.Sprintf("entry point %#x is outside of its segments", e.Entry))
	}
	for _, p := range segments {
		at := guestmem.GPA(p.Paddr)
		if file != nil {
			err = mem.FillFrom(at, int(p.Filesz), file, int64(p.Off))
		} else {
			err = copyIn(mem, at, io.NewSectionReader(r, int64(p.Off), int64(p.Filesz)))
		}
		if err != nil {
			return loaded{}, fmt.Errorf("kernel %s: reading its segment at %#x: %w: the file is truncated or unreadable", path, p.Paddr, err)
		}
	}
	return l, nil
}

func copyIn(mem *guestmem.Memory, at guestmem.GPA, r io.Reader) error {
	buf := make([]byte, 1<<20)
	for {
		n, err := io.ReadFull(r, buf)
		if werr := mem.Write(at, buf[:n]); werr != nil {
			return werr
		}
		at += guestmem.GPA(n)
		switch {
		case err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// Offsets in a bzImage (Documentation/arch/x86/boot.rst, "The Real-Mode Header").
const (
	hdrSetupSects    = 0x1f1
	hdrBootFlag      = 0x1fe
	hdrMagic         = 0x202
	hdrVersion       = 0x206
	hdrPayloadOffset = 0x248
	hdrPayloadLength = 0x24c
	hdrEnd           = 0x290
)

// maxXzDict bounds the memory for an xz stream, in bytes: scripts/xz_wrap.sh asks for at most 128 MiB.
const maxXzDict = 128 << 20

// UnpackBzImage returns the ELF kernel inside a bzImage, and the image's setup header from offset 0x1f1 on. It
// supports gzip, bzip2, lzma, xz, lz4 and zstd.
func UnpackBzImage(image []byte) (vmlinux, header []byte, err error) {
	if len(image) < hdrEnd || binary.LittleEndian.Uint16(image[hdrBootFlag:]) != 0xaa55 ||
		string(image[hdrMagic:hdrMagic+4]) != "HdrS" {
		return nil, nil, errors.New("it has neither an ELF nor a bzImage header")
	}
	if v := binary.LittleEndian.Uint16(image[hdrVersion:]); v < 0x20c {
		return nil, nil, fmt.Errorf("its boot protocol %d.%02d is older than 2.12 and has no 64-bit entry", v>>8, v&0xff)
	}
	sects := uint64(image[hdrSetupSects])
	if sects == 0 {
		sects = 4
	}
	start := (sects+1)*512 + uint64(binary.LittleEndian.Uint32(image[hdrPayloadOffset:]))
	n := uint64(binary.LittleEndian.Uint32(image[hdrPayloadLength:]))
	if n < 8 || start+n > uint64(len(image)) {
		return nil, nil, errors.New("its payload reaches beyond the file: it is truncated")
	}
	vmlinux, err = unpack(image[start : start+n])
	if err != nil {
		return nil, nil, fmt.Errorf("unpacking its payload: %w", err)
	}
	return vmlinux, image[hdrSetupSects:hdrEnd], nil
}

func unpack(p []byte) ([]byte, error) {
	// The last four bytes of a payload are its unpacked size.
	r := bytes.NewReader(p)
	var (
		out io.Reader
		err error
	)
	switch {
	case bytes.HasPrefix(p, []byte(elf.ELFMAG)):
		return p, nil
	case bytes.HasPrefix(p, []byte{0x1f, 0x8b}):
		out, err = gzip.NewReader(r)
	case bytes.HasPrefix(p, []byte("\xfd7zXZ\x00")):
		// Kernels have an x86 filter (scripts/xz_wrap.sh), which github.com/ulikunitz/xz does not support.
		z, zerr := xz.NewReader(r, maxXzDict)
		if zerr == nil {
			z.Multistream(false) // the unpacked size follows
		}
		out, err = z, zerr
	case bytes.HasPrefix(p, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		var d *zstd.Decoder
		d, err = zstd.NewReader(r, zstd.WithDecoderMaxWindow(maxKernel))
		if err == nil {
			defer d.Close()
			out = d
		}
	case bytes.HasPrefix(p, []byte{0x02, 0x21, 0x4c, 0x18}):
		out = lz4.NewReader(r)
	case bytes.HasPrefix(p, []byte("BZh")):
		out = bzip2.NewReader(r)
	case bytes.HasPrefix(p, []byte{0x5d, 0x00, 0x00}):
		out, err = lzma.NewReader(r)
	default:
		return nil, fmt.Errorf("unknown compression, it starts with % x", p[:4])
	}
	if err != nil {
		return nil, err
	}
	size := binary.LittleEndian.Uint32(p[len(p)-4:])
	if size > maxKernel {
		return nil, fmt.Errorf("it says that it unpacks to %d MiB, more than %d", size>>20, maxKernel>>20)
	}
	// The size may be false. Beyond the usual expansion of kernels, the buffer grows only as it fills.
	const usual = 16
	vmlinux := bytes.NewBuffer(make([]byte, 0, min(int(size), usual*len(p))+bytes.MinRead))
	n, err := vmlinux.ReadFrom(io.LimitReader(out, int64(size)))
	if n == int64(size) {
		return vmlinux.Bytes(), nil // the payload may have more bytes after the kernel
	}
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	return nil, fmt.Errorf("it says that it unpacks to %d bytes and has %d: %w", size, n, err)
}
