package freepages

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// ErrUnknown: a guest's kernel does not say where its struct pages are, or not in a way that this package knows.
// Snapshots then store free pages like others.
var ErrUnknown = errors.New("the guest's kernel does not say which pages are free")

// unknown returns an ErrUnknown with a reason.
func unknown(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrUnknown}, args...)...)
}

// The note is an ELF note: sizes of name and description, a type, then both, each padded
// to four bytes. Linux reserves a page for the text.
const (
	noteHeader = 12
	noteName   = "VMCOREINFO\x00"
	// MaxNote bounds the size of a note, in bytes.
	MaxNote = 64 << 10
)

// note has the lines KEY=VALUE of a VMCOREINFO note.
type note map[string]string

// readNote reads the note at gpa, which is at most size bytes long.
func readNote(mem *guestmem.Memory, gpa guestmem.GPA, size uint64) (note, error) {
	if size < noteHeader || size > MaxNote {
		return nil, unknown("a note of %d bytes", size)
	}
	b := make([]byte, size)
	if err := mem.Read(gpa, b); err != nil {
		return nil, unknown("its note: %v", err)
	}
	return parseNote(b)
}

func parseNote(b []byte) (note, error) {
	if len(b) < noteHeader {
		return nil, unknown("its note has %d bytes", len(b))
	}
	nameSize, textSize := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
	if rest := b[noteHeader:]; nameSize == uint32(len(noteName)) && bytes.HasPrefix(rest, []byte(noteName)) {
		if text := rest[min((len(noteName)+3)&^3, len(rest)):]; uint64(textSize) <= uint64(len(text)) {
			n := note{}
			for line := range strings.Lines(string(text[:textSize])) {
				if key, value, ok := strings.Cut(strings.TrimRight(line, "\n\x00"), "="); ok {
					n[key] = value
				}
			}
			return n, nil
		}
	}
	return nil, unknown("there is no note where the agent says")
}

// number returns a decimal number of the note. SIZE, OFFSET, LENGTH and NUMBER are decimal.
func (n note) number(key string) (int64, error) {
	s, ok := n[key]
	if !ok {
		return 0, unknown("its note lacks %s", key)
	}
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, unknown("%s is %q", key, s)
	}
	return v, nil
}

// between returns a number of the note, which must be from least to most.
func (n note) between(key string, least, most int64) (uint64, error) {
	v, err := n.number(key)
	if err == nil && (v < least || v > most) {
		err = unknown("%s is %d", key, v)
	}
	return uint64(v), err
}

// address returns a hexadecimal number of the note. SYMBOL is hexadecimal.
func (n note) address(key string) (uint64, error) {
	s, ok := n[key]
	if !ok {
		return 0, unknown("its note lacks %s", key)
	}
	v, err := strconv.ParseUint(s, 16, 64)
	if err != nil {
		return 0, unknown("%s is %q", key, s)
	}
	return v, nil
}
