package snapshot

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// full returns a manifest with a value in each field. No check has seen it.
func full() *Manifest {
	return &Manifest{
		Version: 2, Arch: "x86-64", ID: "i", Base: "b", Depth: 3, CreatedUnixNano: -5, Sandbox: `a "quoted" \ name`, VCPUs: 4, Kernel: "k", Image: `\"`,
		Memory: MemoryLayout{
			Slots: []Slot{{GPA: 1, Size: 2}, {GPA: 1<<64 - 1, Size: 1<<64 - 1}},
			Files: []MemoryFile{
				{Number: 1, ID: "1", Name: "n", Size: 1<<63 - 1, Index: -1 << 62, StoredPages: 3, Pages: 4, FrameBytes: 5, LeafBytes: 6},
				{Number: 1<<32 - 1},
			},
			RootCRC32C: 7,
		},
		Disks:  []Disk{{Name: "d", Size: 8, Layers: []string{"x", "y"}}, {Layers: []string{}}, {}},
		Host:   map[string]string{"facts": `{"a":"\\"}`, "": "empty", "b": "<&>"},
		Labels: map[string]string{},
		Stats:  Stats{Pages: 9, Frames: 10, StoredBytes: 11},
	}
}

func encoded(t *testing.T, m *Manifest) []byte {
	t.Helper()
	doc, err := m.encodeJSON()
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func TestCanonical_reads_what_is_written(t *testing.T) {
	with := func(change func(*Manifest)) *Manifest {
		m := full()
		change(m)
		return m
	}
	for name, m := range map[string]*Manifest{
		"all fields": full(),
		"none":       {},
		"nil and empty": with(func(m *Manifest) {
			m.Disks, m.Host, m.Memory.Slots, m.Memory.Files = []Disk{}, nil, []Slot{}, nil
		}),
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := canonical(encoded(t, m))
			if !ok {
				t.Fatal("it was left to encoding/json")
			}
			if !reflect.DeepEqual(got, m) {
				t.Errorf("read %+v\nwant %+v", got, m)
			}
		})
	}
}

// The parser must read each field that is added to a manifest. The test fails if full does not set the field.
func TestCanonical_knows_all_fields(t *testing.T) {
	var walk func(v reflect.Value, path string)
	walk = func(v reflect.Value, path string) {
		switch {
		case path == ".Labels": // empty on purpose
		case v.Kind() == reflect.Struct:
			for i := range v.NumField() {
				walk(v.Field(i), path+"."+v.Type().Field(i).Name)
			}
		case v.IsZero():
			t.Errorf("%s is not set in the test's manifest", path)
		case v.Kind() == reflect.Slice:
			walk(v.Index(0), path)
		}
	}
	walk(reflect.ValueOf(*full()), "")
}

func TestCanonical_leaves_the_rest_to_encoding_json(t *testing.T) {
	doc := string(encoded(t, full()))
	for name, change := range map[string][2]string{
		"a space":              {`{"version":2`, `{ "version":2`},
		"no end of line":       {"}\n", "}"},
		"something behind":     {"}\n", "}\n\n"},
		"another name":         {`"arch"`, `"Arch"`},
		"another order":        {`"base":"b","depth":3`, `"depth":3,"base":"b"`},
		"a zero in front":      {`"depth":3`, `"depth":03`},
		"a sign":               {`"depth":3`, `"depth":-3`},
		"minus zero":           {`"created_unix_nano":-5`, `"created_unix_nano":-0`},
		"a fraction":           {`"depth":3`, `"depth":3.0`},
		"no number":            {`"depth":3`, `"depth":`},
		"beyond 32 bits":       {`"depth":3`, `"depth":4294967296`},
		"beyond 64 bits":       {`"pages":9`, `"pages":18446744073709551616`},
		"beyond signed":        {`"created_unix_nano":-5`, `"created_unix_nano":9223372036854775808`},
		"an escape of letters": {`"kernel":"k"`, `"kernel":"\u006b"`},
		"an escaped slash":     {`"kernel":"k"`, `"kernel":"\/"`},
		"a letter beyond":      {`"kernel":"k"`, `"kernel":"é"`},
		"a control":            {`"kernel":"k"`, "\"kernel\":\"\t\""},
		"names in disorder":    {`"b":"<&>","facts"`, `"facts":"","b"`},
		"a name twice":         {`"b":"<&>"`, `"b":"<&>","b":"<&>"`},
		"a comma at the end":   {`["x","y"]`, `["x","y",]`},
		"a comma in front":     {`["x","y"]`, `[,"x","y"]`},
		"an unfinished list":   {`["x","y"]`, `["x","y"`},
		"escaped HTML":         {`<&>`, `\u003c\u0026\u003e`},
	} {
		t.Run(name, func(t *testing.T) {
			changed := strings.Replace(doc, change[0], change[1], 1)
			if changed == doc {
				t.Fatal("the test changes nothing")
			}
			if m, ok := canonical([]byte(changed)); ok {
				t.Errorf("it was read: %+v", m)
			}
		})
	}
	for n := range len(doc) {
		if _, ok := canonical([]byte(doc[:n])); ok {
			t.Errorf("its first %d of %d bytes were read", n, len(doc))
		}
	}
}

// FuzzCanonical checks that encoding/json reads the same as canonical, and that it is written as the same bytes.
func FuzzCanonical(f *testing.F) {
	for _, m := range []*Manifest{full(), {}} {
		doc, err := m.encodeJSON()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(doc)
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		m, ok := canonical(doc)
		if !ok {
			return
		}
		var want Manifest
		if err := json.Unmarshal(doc, &want); err != nil {
			t.Fatalf("encoding/json cannot read it: %v", err)
		}
		if !reflect.DeepEqual(*m, want) {
			t.Fatalf("read %+v\nwant %+v", *m, want)
		}
		if again, err := m.encodeJSON(); err != nil || !bytes.Equal(again, doc) {
			t.Fatalf("it is written in another way: %q, %v", again, err)
		}
	})
}
