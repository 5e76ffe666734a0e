package secrets

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"testing"
)

func (d *Device) out32(off uint64, v uint32) {
	d.WriteIO(off, binary.LittleEndian.AppendUint32(nil, v))
}

func (d *Device) in32(off uint64) uint32 {
	var b [4]byte
	d.ReadIO(off, b[:])
	return binary.LittleEndian.Uint32(b[:])
}

func (d *Device) read(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		d.ReadIO(Data, out[i:i+1])
	}
	return out
}

func mustSet(t *testing.T, d *Device, name, value string) {
	t.Helper()
	if err := d.Set(Secret{Name: name, Mode: 0o444}, []byte(value)); err != nil {
		t.Fatal(err)
	}
}

func TestGuest_reads_table_and_value(t *testing.T) {
	d := New()
	defer d.Close()
	mustSet(t, d, "b", "value")
	if err := d.Await(Secret{Name: "a", Mode: 0o400, UID: 7, GID: 8}); err != nil {
		t.Fatal(err)
	}
	d.out32(Select, 0)
	n := d.in32(Select)
	table := d.read(int(n))
	want := []byte{1, 2}
	want = append(want, 2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 7, 0, 0, 0, 8, 0, 0, 0, 0, 1, 1, 'a')
	want = append(want, 1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x24, 1, 1, 'b')
	if !bytes.Equal(table, want) {
		t.Errorf("the table is % x, want % x", table, want)
	}
	if d.Busy() {
		t.Error("the table counts as a secret")
	}
	d.out32(Select, 1)
	d.out32(Seek, 2)
	if n := d.in32(Select); n != 3 {
		t.Errorf("%d bytes left, want 3", n)
	}
	if got := d.read(4); string(got) != "lue\x00" {
		t.Errorf("read %q", got)
	}
	if got, want := d.in32(Seek), crc32.Checksum([]byte("lue\x00"), castagnoli); got != want {
		t.Errorf("sum %#x, want %#x", got, want)
	}
	if !d.Busy() {
		t.Error("a value was read, and nobody has said that it was wiped")
	}
	d.WriteIO(Wiped, []byte{1})
	if d.Busy() {
		t.Error("it was wiped")
	}
}

func TestSecret_that_is_replaced_while_it_is_read_has_a_wrong_sum(t *testing.T) {
	for name, change := range map[string]func(*Device){
		"replaced": func(d *Device) { mustSet(t, d, "a", "other") },
		"removed":  func(d *Device) { d.Remove("a") },
	} {
		t.Run(name, func(t *testing.T) {
			d := New()
			defer d.Close()
			mustSet(t, d, "a", "value")
			d.out32(Select, 1)
			got := d.read(2)
			change(d)
			got = append(got, d.read(3)...)
			if d.in32(Seek) == crc32.Checksum(got, castagnoli) {
				t.Errorf("%q passes for the secret", got)
			}
		})
	}
}

func TestAwaited_secret_keeps_a_value_that_there_is(t *testing.T) {
	d := New()
	defer d.Close()
	mustSet(t, d, "a", "value")
	if err := d.Await(Secret{Name: "a"}); err != nil {
		t.Fatal(err)
	}
	if l := d.List(); len(l) != 1 || !l[0].Present || l[0].Size != 5 {
		t.Errorf("got %+v", l)
	}
	mustSet(t, d, "empty", "")
	if l := d.List(); !l[1].Present || l[1].Size != 0 {
		t.Errorf("an empty one: %+v", l[1])
	}
}

func TestImpossible_secrets_are_refused(t *testing.T) {
	d := New()
	defer d.Close()
	for _, s := range []Secret{{Name: ""}, {Name: ".."}, {Name: "a/b"}, {Name: "a\x00"}, {Name: strings.Repeat("a", MaxName+1)}, {Name: "a", Mode: 0o1777}} {
		if err := d.Set(s, nil); !errors.Is(err, ErrSecret) {
			t.Errorf("%+v: got %v, want ErrSecret", s, err)
		}
	}
	if err := d.Set(Secret{Name: "a"}, make([]byte, MaxValue+1)); !errors.Is(err, ErrSecret) {
		t.Errorf("a large one: got %v, want ErrSecret", err)
	}
	for i := range MaxSecrets {
		mustSet(t, d, fmt.Sprint("s", i), "v")
	}
	if err := d.Await(Secret{Name: "one-more"}); !errors.Is(err, ErrTooMany) {
		t.Errorf("got %v, want ErrTooMany", err)
	}
}

func TestNothing_is_left_of_secrets_that_are_gone(t *testing.T) {
	d := New()
	mustSet(t, d, "a", "value")
	d.out32(Select, 1)
	d.read(1)
	d.Remove("a")
	if d.Busy() || d.in32(Select) != 0 {
		t.Error("a secret that was removed can be read")
	}
	mustSet(t, d, "a", "value")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d.out32(Select, 2)
	if d.in32(Select) != 0 || d.Set(Secret{Name: "b"}, nil) == nil {
		t.Error("there are secrets after the end")
	}
}

// Whatever a guest does at the ports gives an answer.
func FuzzPorts(f *testing.F) {
	f.Add([]byte{0, 4, 0, 0, 0, 0, 8, 1, 12, 1, 1})
	f.Add([]byte{0x80, 4, 0x88, 1, 0x84, 4, 4, 4, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		d := New()
		defer d.Close()
		mustSet(t, d, "a", "value")
		for len(b) >= 2 {
			off, n := uint64(b[0]&15), int(b[1]&3)+1
			read := b[0]&0x80 != 0
			b = b[2:]
			p := make([]byte, min(n, Ports-int(off)))
			if read {
				d.ReadIO(off, p)
				continue
			}
			b = b[copy(p, b):]
			d.WriteIO(off, p)
		}
	})
}

func TestGuest_counts_as_having_wiped_all_when_its_last_secret_is_gone(t *testing.T) {
	d := New()
	defer d.Close()
	mustSet(t, d, "a", "value")
	mustSet(t, d, "b", "value")
	d.out32(Select, 1)
	d.read(2)
	if d.Remove("b"); !d.Busy() {
		t.Error("the guest may have a copy of the other")
	}
	if d.Remove("a"); d.Busy() {
		t.Error("the guest counts as having a copy, and there is nothing to read")
	}
}
