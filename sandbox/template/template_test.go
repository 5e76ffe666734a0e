package template

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// The author of a new field must say here what it means for templates. A field that changes the boot of a guest must
// be in the key: two VMs of one key have the same memory.
func TestBare_decides_about_every_field_of_a_VM(t *testing.T) {
	const key, applied, boots = "in the key", "applied to a VM that has booted", "such a VM boots"
	does := map[string]string{
		"Image": key, "Kernel": key, "VCPUs": key, "MemoryMiB": key, "DiskMiB": key, "Network": key, "IPv6": key, "Cmdline": key, "NoACPI": key,
		"Name": applied, "Hostname": applied, // by the host, and by the agent in a new identity
		"Policy": applied, "Tags": applied, "Hooks": applied, "Idle": applied, "Self": applied, // by the host
		"DiskQuotaMiB": applied,
		"Services":     applied, // started after the boot
		"Volumes":      boots, "Shares": boots,
	}
	of := reflect.TypeFor[spec.VM]()
	plain := key2(t, spec.VM{})
	for i := range of.NumField() {
		f := of.Field(i)
		var s spec.VM
		fill(reflect.ValueOf(&s).Elem().Field(i))
		want, decided := does[f.Name]
		got := applied
		switch {
		case Unsuited(s) != "":
			got = boots
		case key2(t, s) != plain:
			got = key
		}
		if !decided || got != want {
			t.Errorf("%s is to be %q, and is %q", f.Name, want, got)
		}
	}
}

// key2 is the key of a VM whose image and kernel have its own names as ids.
func key2(t *testing.T, s spec.VM) string {
	t.Helper()
	k, err := Key(Bare(s, s.Image, s.Kernel), nil)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// fill gives a field a value that is not zero.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Int:
		v.SetInt(7)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	case reflect.Struct:
		fill(v.Field(0))
	default:
		panic("no value for " + v.Type().String())
	}
}

func TestKey_changes_with_the_content_of_a_file_and_with_what_boots(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kernel")
	key := func(boot any) string {
		k, err := Key(spec.VM{}, boot, path, "")
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	write := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("one")
	first := key("quiet")
	if key("quiet") != first {
		t.Error("the same has two keys")
	}
	if key("loud") == first {
		t.Error("other parameters have the same key")
	}
	// Another file with the same size and the same time.
	old, err := os.Stat(path)
	if err == nil {
		err = os.Rename(path, path+".old")
	}
	if err != nil {
		t.Fatal(err)
	}
	write("two")
	if err := os.Chtimes(path, old.ModTime(), old.ModTime()); err != nil {
		t.Fatal(err)
	}
	if key("quiet") == first {
		t.Error("a file that was replaced has the same key")
	}
	if _, err := Key(spec.VM{}, nil, path+".gone"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the file: %v", err)
	}
}

func TestHost_stamp_has_features_of_the_CPU_and_not_its_clock(t *testing.T) {
	text := "processor\t: 0\nmodel name\t: one\ncpu MHz\t\t: %s\nflags\t\t: fpu %s\n\nprocessor\t: 1\nmodel name\t: other\n"
	of := func(mhz, flags string) string {
		s, err := firstCPU(strings.NewReader(fmt.Sprintf(text, mhz, flags)))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if a, b := of("1000", "avx"), of("2000", "avx"); a != b || !strings.Contains(a, "avx") || strings.Contains(a, "other") {
		t.Errorf("it is %q and %q", a, b)
	}
	if of("1000", "avx") == of("1000", "avx2") {
		t.Error("another feature does not count")
	}
}

func keyOf(n int) string { return fmt.Sprintf("%064x", n) }

func TestDir_keeps_one_entry_a_key_and_bounds_their_number(t *testing.T) {
	d := In(t.TempDir())
	if list, _, err := d.List(); len(list) != 0 || err != nil {
		t.Errorf("without a directory: %v, %v", list, err)
	}
	for n := range MaxWanted + 3 {
		if err := d.Want(keyOf(n), spec.VM{Image: "a"}); err != nil {
			t.Fatal(err)
		}
	}
	if list, _, err := d.List(); len(list) != MaxWanted || err != nil {
		t.Errorf("%d are wanted (%v), want %d", len(list), err, MaxWanted)
	}
	for n := range MaxReady + 2 {
		if err := d.Put(Entry{Key: keyOf(n), Snapshot: fmt.Sprint("s", n)}); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1000-n), 0)
		if err := os.Chtimes(d.File(keyOf(n)), at, at); err != nil {
			t.Fatal(err)
		}
	}
	d.Use(keyOf(MaxReady + 1))
	gone, err := d.Trim()
	if err != nil || !reflect.DeepEqual(gone, []string{fmt.Sprint("s", MaxReady), fmt.Sprint("s", MaxReady-1)}) {
		t.Errorf("it has removed %v (%v)", gone, err)
	}
	// A late creation wants what was made meanwhile.
	if err := d.Want(keyOf(1), spec.VM{}); err != nil {
		t.Fatal(err)
	}
	if e, err := d.Find(keyOf(1)); err != nil || !e.Ready() {
		t.Errorf("it is %+v (%v)", e, err)
	}
	if _, err := d.Find(keyOf(1)[:20]); !errors.Is(err, ErrNotFound) {
		t.Errorf("an ambiguous key: %v", err)
	}
}

func FuzzGet(f *testing.F) {
	f.Add([]byte(`{"version":1,"key":"` + keyOf(1) + `","snapshot":"a"}`))
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, data []byte) {
		d := In(t.TempDir())
		if err := os.MkdirAll(d.path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(d.File(keyOf(1)), data, 0o600); err != nil {
			t.Fatal(err)
		}
		e, err := d.Get(keyOf(1))
		list, bad, _ := d.List()
		if (err == nil) != (len(list) == 1) || (err != nil) != (len(bad) == 1) || err != nil && !errors.Is(err, ErrEntry) || err == nil && e.Key != keyOf(1) {
			t.Errorf("%v, %+v, %v", err, list, bad)
		}
	})
}
