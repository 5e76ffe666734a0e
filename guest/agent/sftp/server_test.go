package sftp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// packet is a request.
func packet(typ byte, id uint32, fields ...any) []byte {
	b := []byte{0, 0, 0, 0, typ}
	b = binary.BigEndian.AppendUint32(b, id)
	for _, f := range fields {
		switch f := f.(type) {
		case string:
			b = appendString(b, f)
		case int:
			b = binary.BigEndian.AppendUint32(b, uint32(f))
		case uint64:
			b = binary.BigEndian.AppendUint64(b, f)
		}
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

// answers serves requests and returns what was answered: types, with status codes added
// to 1000.
func answers(t *testing.T, requests ...[]byte) ([]int, [][]byte) {
	t.Helper()
	var out bytes.Buffer
	if err := Serve(bytes.NewReader(bytes.Join(requests, nil)), &out, "/"); err != nil {
		t.Fatal(err)
	}
	var kinds []int
	var bodies [][]byte
	for p := out.Bytes(); len(p) > 0; {
		n := binary.BigEndian.Uint32(p)
		body := p[4 : 4+n]
		p = p[4+n:]
		kind := int(body[0])
		if kind == typeStatus {
			kind = 1000 + int(binary.BigEndian.Uint32(body[5:]))
		}
		kinds, bodies = append(kinds, kind), append(bodies, body)
	}
	return kinds, bodies
}

func TestServe_answers_each_request(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	os.WriteFile(file, []byte("0123456789"), 0o644)
	os.Symlink("f", filepath.Join(dir, "l"))
	for name, tt := range map[string]struct {
		requests [][]byte
		want     int
	}{
		"stat":                         {[][]byte{packet(typeStat, 1, file)}, typeAttrs},
		"stat of nothing":              {[][]byte{packet(typeStat, 1, file+"x")}, 1000 + statusNoSuchFile},
		"stat of a path with a zero":   {[][]byte{packet(typeStat, 1, "a\x00b")}, 1000 + statusBadMessage},
		"a request that is cut off":    {[][]byte{packet(typeStat, 1)}, 1000 + statusBadMessage},
		"a length beyond the packet":   {[][]byte{packet(typeStat, 1, 1<<31-1)}, 1000 + statusBadMessage},
		"a request of another version": {[][]byte{packet(30, 1)}, 1000 + statusUnsupported},
		"an unknown extension":         {[][]byte{packet(typeExtended, 1, "x@y")}, 1000 + statusUnsupported},
		"read":                         {[][]byte{packet(typeOpen, 1, file, openRead, 0), packet(typeRead, 2, "1", uint64(3), 4)}, typeData},
		"read at the end":              {[][]byte{packet(typeOpen, 1, file, openRead, 0), packet(typeRead, 2, "1", uint64(10), 4)}, 1000 + statusEOF},
		"read far away":                {[][]byte{packet(typeOpen, 1, file, openRead, 0), packet(typeRead, 2, "1", uint64(1<<63), 4)}, 1000 + statusBadMessage},
		"read of 4 GiB":                {[][]byte{packet(typeOpen, 1, file, openRead, 0), packet(typeRead, 2, "1", uint64(0), 1<<32-1)}, typeData},
		"read of a closed file":        {[][]byte{packet(typeOpen, 1, file, openRead, 0), packet(typeClose, 2, "1"), packet(typeRead, 2, "1", uint64(0), 1)}, 1000 + statusBadMessage},
		"write to what is read":        {[][]byte{packet(typeOpen, 1, file, openRead, 0), packet(typeWrite, 2, "1", uint64(0), "x")}, 1000 + statusFailure},
		"open for nothing":             {[][]byte{packet(typeOpen, 1, file, 0, 0)}, 1000 + statusBadMessage},
		"open what is there anew":      {[][]byte{packet(typeOpen, 1, file, openWrite|openCreate|openExcl, 0)}, 1000 + statusFailure},
		"list a file":                  {[][]byte{packet(typeOpendir, 1, file)}, 1000 + statusNoSuchFile},
		"list":                         {[][]byte{packet(typeOpendir, 1, dir), packet(typeReaddir, 2, "1")}, typeName},
		"list to the end":              {[][]byte{packet(typeOpendir, 1, dir), packet(typeReaddir, 2, "1"), packet(typeReaddir, 2, "1")}, 1000 + statusEOF},
		"list an open file":            {[][]byte{packet(typeOpen, 1, file, openRead, 0), packet(typeReaddir, 2, "1")}, 1000 + statusBadMessage},
		"rename onto another":          {[][]byte{packet(typeRename, 1, file, dir+"/l")}, 1000 + statusFailure},
		"real path of nothing yet":     {[][]byte{packet(typeRealpath, 1, dir+"/new")}, typeName},
		"real path below nothing":      {[][]byte{packet(typeRealpath, 1, dir+"/new/x")}, 1000 + statusNoSuchFile},
		"home":                         {[][]byte{packet(typeExtended, 1, "expand-path@openssh.com", "~")}, typeName},
		"home of another":              {[][]byte{packet(typeExtended, 1, "expand-path@openssh.com", "~x")}, 1000 + statusUnsupported},
		"limits":                       {[][]byte{packet(typeExtended, 1, "limits@openssh.com")}, typeExtendedReply},
		"file systems":                 {[][]byte{packet(typeExtended, 1, "statvfs@openssh.com", dir)}, typeExtendedReply},
	} {
		got, bodies := answers(t, tt.requests...)
		if len(got) != len(tt.requests) || got[len(got)-1] != tt.want {
			t.Errorf("%s: got %v, want %d: %q", name, got, tt.want, bodies)
		}
	}
	_, bodies := answers(t, packet(typeOpen, 1, file, openRead, 0), packet(typeRead, 7, "1", uint64(3), 4))
	if want := append([]byte{typeData, 0, 0, 0, 7, 0, 0, 0, 4}, "3456"...); !bytes.Equal(bodies[1], want) {
		t.Errorf("read %q, want %q", bodies[1], want)
	}
}

func TestServe_handles_are_bounded(t *testing.T) {
	var requests [][]byte
	for i := range maxHandles + 1 {
		requests = append(requests, packet(typeOpendir, uint32(i), "/"))
	}
	got, _ := answers(t, requests...)
	if got[maxHandles-1] != typeHandle || got[maxHandles] != 1000+statusFailure {
		t.Errorf("the last two: %v", got[maxHandles-1:])
	}
}

func TestServe_ends_at_a_packet_that_is_none(t *testing.T) {
	for name, in := range map[string]string{
		"too long":  "\x00\x04\x00\x01\x01",
		"too short": "\x00\x00\x00\x04\x01\x00\x00\x00",
		"a head":    "\x00\x00\x00",
		"cut off":   "\x00\x00\x00\x09\x01\x00",
	} {
		if err := Serve(strings.NewReader(in), io.Discard, "/"); !errors.Is(err, ErrPacket) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestLongName_looks_as_that_of_ls(t *testing.T) {
	st := unix.Stat_t{Mode: unix.S_IFREG | unix.S_ISUID | 0o4654, Nlink: 2, Uid: 10, Gid: 100000000, Size: 12345}
	st.Mtim.Sec = 100 * 24 * 3600 // of 1970 in every time zone
	if got := longName("name", &st); !strings.HasPrefix(got, "-rwSr-xr--    2       10 100000000    12345 ") || !strings.HasSuffix(got, " 1970 name") {
		t.Errorf("got %q", got)
	}
}

// What is fuzzed changes nothing: requests that name files see only what is open.
func FuzzServe(f *testing.F) {
	f.Add(packet(typeInit, 3))
	f.Add(packet(typeRead, 1, "1", uint64(0), 10))
	f.Add(packet(typeFsetstat, 1, "1", attrSize))
	f.Add(packet(typeReaddir, 1, "1"))
	f.Add(packet(typeExtended, 1, "limits@openssh.com"))
	f.Fuzz(func(t *testing.T, in []byte) {
		dir := t.TempDir()
		fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		s := &server{home: dir, handles: map[string]*handle{"1": {f: os.NewFile(uintptr(fd), "f")}}}
		defer s.handles["1"].f.Close()
		for typ := range byte(255) {
			switch typ {
			case typeOpen, typeSetstat, typeMkdir, typeRemove, typeRmdir, typeRename, typeSymlink, typeClose, typeWrite, typeFsetstat:
				// Parsed only.
				r := &reader{p: in}
				_, _, _, _ = r.uint32(), r.string(), r.uint64(), r.attrs()
				continue
			case typeExtended:
				if strings.Contains(string(in), "link@") || strings.Contains(string(in), "rename@") || strings.Contains(string(in), "stat@") {
					continue
				}
			}
			s.reply = append(s.reply[:0], 0, 0, 0, 0)
			s.answer(typ, in)
			if len(s.reply) < 9 || len(s.reply) > maxPacket+4 {
				t.Fatalf("an answer of %d bytes to type %d", len(s.reply), typ)
			}
		}
	})
}
