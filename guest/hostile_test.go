package guest_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// frame returns a ttrpc message of the guest: type 2 is a response, 3 is data.
func frame(id uint32, kind, flags byte, body []byte) []byte {
	b := make([]byte, 10, 10+len(body))
	binary.BigEndian.PutUint32(b[0:], uint32(len(body)))
	binary.BigEndian.PutUint32(b[4:], id)
	b[8], b[9] = kind, flags
	return append(b, body...)
}

func message(m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return b
}

func data(m proto.Message) []byte { return frame(1, 3, 0, message(m)) }

func response(id uint32, m proto.Message) []byte {
	return frame(id, 2, 0, message(&ttrpc.Response{Payload: message(m)}))
}

// hostileGuest waits on each connection until the host has sent something. It then answers with the given bytes
// and keeps the connection open.
func hostileGuest(t *testing.T, say ...[]byte) *guest.Client {
	t.Helper()
	c, _ := hostileGuestSays(t, say...)
	return c
}

// hostileGuestSays is hostileGuest with a channel. The channel closes when the first connection has carried all
// the bytes, or the host has closed it.
func hostileGuestSays(t *testing.T, say ...[]byte) (*guest.Client, <-chan struct{}) {
	t.Helper()
	var (
		wg   sync.WaitGroup
		once sync.Once
	)
	said := make(chan struct{})
	dial := func(context.Context, uint32) (net.Conn, error) {
		host, evil := net.Pipe()
		wg.Go(func() {
			defer evil.Close()
			var b [1]byte
			if _, err := evil.Read(b[:]); err != nil {
				return
			}
			read := make(chan struct{})
			go func() {
				defer close(read)
				_, _ = io.Copy(io.Discard, evil)
			}()
			defer once.Do(func() { close(said) })
			for _, p := range say {
				if _, err := evil.Write(p); err != nil {
					return
				}
			}
			once.Do(func() { close(said) })
			<-read
		})
		return host, nil
	}
	c, err := guest.Dial(t.Context(), dial)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		wg.Wait()
	})
	return c, said
}

func started() []byte {
	return data(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Started{Started: &agentpb.ExecStarted{Id: "x", Pid: 1}}})
}

func output(p []byte) []byte {
	return data(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Output{Output: &agentpb.ExecOutput{Data: p}}})
}

func TestHostile_answers_end_the_connection_and_not_the_host(t *testing.T) {
	ping := func(ctx context.Context, c *guest.Client) error { _, err := c.Ping(ctx); return err }
	exec := func(ctx context.Context, c *guest.Client) error { _, err := c.Exec(ctx, sh("true")); return err }
	list := func(ctx context.Context, c *guest.Client) error { _, err := c.ReadDir(ctx, "/"); return err }
	huge := make([]byte, 10)
	binary.BigEndian.PutUint32(huge, 1<<32-1)
	huge[7], huge[8] = 1, 2
	entries := func(names ...string) []byte {
		r := &agentpb.ReadDirResponse{}
		for _, n := range names {
			r.Entries = append(r.Entries, &agentpb.FileInfo{Name: n})
		}
		return response(1, r)
	}
	for _, tt := range []struct {
		name string
		say  []byte
		call func(context.Context, *guest.Client) error
	}{
		{"a message of 4 GiB", huge, ping},
		{"a message just above the limit", frame(1, 2, 0, make([]byte, agentpb.MaxMessage+1)), ping},
		{"a message of another type", frame(1, 1, 0, nil), ping},
		{"an answer to another call", response(3, &agentpb.PingResponse{}), ping},
		{"an answer to call 0", response(0, &agentpb.PingResponse{}), ping},
		{"stream data in answer to a plain call", frame(1, 3, 0, []byte("x")), ping},
		{"output before the start", output([]byte("x")), exec},
		{"an output chunk above the limit", append(started(), output(make([]byte, agentpb.MaxChunk+1))...), exec},
		{"acknowledgement of what was not sent", append(started(), data(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Ack{Ack: 5}})...), exec},
		{"two starts", append(started(), started()...), exec},
		{"a long id", data(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Started{Started: &agentpb.ExecStarted{Id: strings.Repeat("x", 65)}}}), exec},
		{"not started and yet well ended", data(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Exit{Exit: &agentpb.ExecExit{}}}), exec},
		{"an empty message", data(&agentpb.ExecResponse{}), exec},
		{"a name with a slash", entries("a/b"), list},
		{"a name that is the parent", entries(".."), list},
		{"a name with a zero byte", entries("a\x00"), list},
		{"names out of order", entries("b", "a"), list},
		{"an empty name", entries(""), list},
		{"more to come, for ever", response(1, &agentpb.ReadDirResponse{More: true}), list},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if err := tt.call(ctx, hostileGuest(t, tt.say)); !errors.Is(err, guest.ErrProtocol) {
				t.Errorf("error %v, want ErrProtocol", err)
			}
		})
	}
}

// stalled is a Stdout that takes nothing until the guest has sent everything or was cut off.
type stalled struct{ said <-chan struct{} }

func (w stalled) Write(p []byte) (int, error) {
	<-w.said
	return len(p), nil
}

func TestHostile_more_output_than_the_window_allows_is_refused(t *testing.T) {
	c, said := hostileGuestSays(t, started(), bytes.Repeat(output([]byte("x")), 1000))
	cmd := sh("true")
	cmd.Stdout = stalled{said}
	if _, err := c.Exec(t.Context(), cmd); !errors.Is(err, guest.ErrProtocol) {
		t.Errorf("error %v, want ErrProtocol", err)
	}
}

func TestHostile_silence_ends_with_the_context(t *testing.T) {
	c := hostileGuest(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := c.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ping: %v", err)
	}
	if _, err := c.Exec(ctx, sh("true")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("exec: %v", err)
	}
	if _, err := c.ReadFile(ctx, "/x", io.Discard, 0, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
}

func TestHostile_error_texts_cannot_forge_lines_or_drive_a_terminal(t *testing.T) {
	err := &guest.RemoteError{Op: "stat", Message: "no\x1b[2J\nlevel=error msg=forged" + strings.Repeat("x", 10000)}
	if s := err.Error(); strings.ContainsAny(s, "\x1b\n") || len(s) > 5000 {
		t.Errorf("got %q", s)
	}
}

func TestHostile_ReadFile_of_more_than_was_asked_for_is_refused(t *testing.T) {
	chunk := data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: make([]byte, 100)}})
	var got bytes.Buffer
	if _, err := hostileGuest(t, chunk).ReadFile(t.Context(), "/x", &got, 0, 99); !errors.Is(err, guest.ErrProtocol) || got.Len() > 99 {
		t.Errorf("%d bytes, %v", got.Len(), err)
	}
}

func TestHostile_archives_do_not_leave_their_directory(t *testing.T) {
	reg := func(name string) *tar.Header { return &tar.Header{Name: name, Typeflag: tar.TypeReg} }
	link := func(name, to string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
	}
	for _, tt := range []struct {
		name    string
		entries func(outside string) []*tar.Header
		fails   bool
	}{
		{"absolute name", func(o string) []*tar.Header { return []*tar.Header{reg(o + "/new")} }, true},
		{"name that climbs", func(string) []*tar.Header { return []*tar.Header{reg("x/../../new")} }, true},
		{"name that is the parent", func(string) []*tar.Header { return []*tar.Header{{Name: "..", Typeflag: tar.TypeDir}} }, true},
		{"through an absolute link", func(o string) []*tar.Header { return []*tar.Header{link("x/l", o), reg("x/l/new")} }, false},
		{"through a relative link", func(string) []*tar.Header {
			return []*tar.Header{link("x/l", "../../outside"), reg("x/l/new")}
		}, false},
		{"over a link", func(o string) []*tar.Header { return []*tar.Header{link("x/l", o+"/victim"), reg("x/l")} }, false},
		{"hard link to a file outside", func(o string) []*tar.Header {
			return []*tar.Header{{Name: "x/h", Typeflag: tar.TypeLink, Linkname: "../outside/victim"}}
		}, true},
		{"hard link through a link", func(o string) []*tar.Header {
			return []*tar.Header{link("x/l", o), {Name: "x/h", Typeflag: tar.TypeLink, Linkname: "x/l/victim"}}
		}, true},
		{"directory over a link", func(o string) []*tar.Header {
			return []*tar.Header{link("x/l", o), {Name: "x/l/", Typeflag: tar.TypeDir}, reg("x/l/new")}
		}, false},
		{"a device", func(string) []*tar.Header {
			return []*tar.Header{{Name: "x/dev", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}
		}, false},
		{"very deep", func(string) []*tar.Header { return []*tar.Header{reg(strings.Repeat("d/", 300) + "f")} }, true},
	} {
		for _, keep := range []bool{false, true} {
			t.Run(tt.name+map[bool]string{true: ", links kept"}[keep], func(t *testing.T) {
				dir := t.TempDir()
				outside, dest := filepath.Join(dir, "outside"), filepath.Join(dir, "dest")
				write(t, outside+"/victim", "safe", 0o644)
				write(t, dest+"/mine", "safe", 0o644)
				c := hostileGuest(t,
					data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: hostileTar(tt.entries(outside)...)}}),
					data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: &agentpb.TransferDone{}}}))
				_, err := c.CopyOut(t.Context(), "/x", dest, guest.CopyOptions{KeepLinks: keep})
				if tt.fails && err == nil {
					t.Error("it was accepted")
				}
				for _, f := range []string{outside + "/victim", dest + "/mine"} {
					if b, _ := os.ReadFile(f); string(b) != "safe" {
						t.Errorf("%s is now %q", f, b)
					}
				}
				if e, _ := os.ReadDir(outside); len(e) != 1 {
					t.Errorf("there is more outside now: %v", e)
				}
				if e, _ := os.ReadDir(dir); len(e) != 2 {
					t.Errorf("there is more beside the destination now: %v", e)
				}
				if fi, err := os.Lstat(dest + "/x/dev"); err == nil {
					t.Errorf("a device was made: %v", fi.Mode())
				}
				_ = filepath.WalkDir(dest, func(p string, d os.DirEntry, err error) error {
					if err == nil && !keep && d.Type() == os.ModeSymlink {
						to, _ := os.Readlink(p)
						t.Errorf("a link to %s was made", to)
					}
					return nil
				})
			})
		}
	}
}

// The name of the second link goes through the first, so it leads higher than its name says.
func linkThroughLink(top string) []byte {
	dir := func(name string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}
	}
	link := func(name, to string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
	}
	return hostileTar(dir(top), dir(top+"/a"), dir(top+"/a/b"), link(top+"/a/b/x", "../.."), link(top+"/a/b/x/y", ".."),
		&tar.Header{Name: top + "/y/mine", Typeflag: tar.TypeReg, Mode: 0o644})
}

func TestAttack_copy_out_overwrites_a_neighbour_by_a_link_through_a_link(t *testing.T) {
	dest := t.TempDir()
	write(t, dest+"/mine", "safe", 0o600)
	c := hostileGuest(t,
		data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: linkThroughLink("x")}}),
		data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: &agentpb.TransferDone{}}}))
	if _, err := c.CopyOut(t.Context(), "/x", dest, guest.CopyOptions{}); !errors.Is(err, guest.ErrUnsafe) {
		t.Errorf("got %v, want ErrUnsafe", err)
	}
	if b, err := os.ReadFile(dest + "/mine"); err != nil || string(b) != "safe" {
		t.Errorf("a file beside the copy is now %q, %v", b, err)
	}
	if got := entries(t, dest); len(got) != 2 {
		t.Errorf("there is more beside the copy now: %q", got)
	}
}

func TestHostile_archive_that_never_ends_is_cut_at_its_limit(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{Name: "x/bomb", Typeflag: tar.TypeReg, Size: 1 << 50, Format: tar.FormatPAX})
	c := hostileGuest(t, data(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: b.Bytes()}}))
	if _, err := c.CopyOut(t.Context(), "/x", t.TempDir(), guest.CopyOptions{}); !errors.Is(err, guest.ErrLimit) {
		t.Errorf("error %v, want ErrLimit", err)
	}
}

func TestUnixDialer_tells_a_guest_that_is_not_up_from_one_that_lies(t *testing.T) {
	for _, tt := range []struct {
		name, answer string
		want         error
	}{
		{"closes", "", guest.ErrUnavailable},
		{"cuts the line", "OK 1", guest.ErrUnavailable},
		{"says something else", "NO 1\n", guest.ErrProtocol},
		{"gives no number", "OK x\n", guest.ErrProtocol},
		{"gives too large a number", "OK 4294967296\n", guest.ErrProtocol},
		{"never ends its line", strings.Repeat("x", 100), guest.ErrUnavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			var wg sync.WaitGroup
			wg.Go(func() {
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				buf := make([]byte, 64)
				n, _ := c.Read(buf)
				if string(buf[:n]) != "CONNECT 1024\n" {
					t.Errorf("the host said %q", buf[:n])
				}
				_, _ = io.WriteString(c, tt.answer)
			})
			defer wg.Wait()
			if _, err := guest.Dial(t.Context(), guest.UnixDialer(path)); !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
		})
	}
	if _, err := guest.Dial(t.Context(), guest.UnixDialer("/no/such/socket")); !errors.Is(err, guest.ErrUnavailable) {
		t.Errorf("no socket: %v", err)
	}
}

func TestUnixDialer_that_gets_no_answer_ends_with_its_context(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := guest.Dial(ctx, guest.UnixDialer(path)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

func TestWaitReady_waits_for_the_report_and_ignores_others(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for _, line := range []string{"", "hello\n", strings.Repeat("x", 500), "ready v1.2.3\n"} {
			c, err := net.Dial("unix", path)
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(c, line)
			c.Close()
		}
	})
	if v, err := guest.WaitReady(t.Context(), l); err != nil || v.Version != "v1.2.3" {
		t.Errorf("got %q, %v", v.Version, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := guest.WaitReady(ctx, l); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with nobody there: %v", err)
	}
}

// Each page of a directory is within the bound of a message, and there are pages for 32 GiB.
func TestAttack_pages_of_a_directory_fill_the_memory_of_the_host(t *testing.T) {
	t.Parallel()
	link := strings.Repeat("x", agentpb.MaxMessage-1000)
	var wg sync.WaitGroup
	defer wg.Wait()
	c, err := guest.Dial(t.Context(), func(context.Context, uint32) (net.Conn, error) {
		host, evil := net.Pipe()
		wg.Go(func() {
			defer evil.Close()
			head := make([]byte, 10)
			for n := 0; ; n++ {
				if _, err := io.ReadFull(evil, head); err != nil {
					return
				}
				if _, err := io.CopyN(io.Discard, evil, int64(binary.BigEndian.Uint32(head))); err != nil {
					return
				}
				page := &agentpb.ReadDirResponse{More: true, Entries: []*agentpb.FileInfo{{Name: fmt.Sprintf("%08d", n), Link: link}}}
				if _, err := evil.Write(response(binary.BigEndian.Uint32(head[4:]), page)); err != nil {
					return
				}
			}
		})
		return host, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := c.ReadDir(t.Context(), "/"); !errors.Is(err, guest.ErrLimit) {
		t.Errorf("error %v, want ErrLimit", err)
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 1<<30 {
		t.Errorf("the host holds %d MiB more", grown>>20)
	}
}
