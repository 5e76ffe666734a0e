package guest_test

import (
	"context"
	"encoding/json"
	"io"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// asked is a call of the host. The texts that it takes from the answer must be printable.
type asked struct {
	name   string
	stream bool
	seed   proto.Message
	call   func(ctx context.Context, c *guest.Client, dir string) (texts any, err error)
}

const (
	// fuzzTime is far more than a call takes after its guest has hung up.
	fuzzTime = time.Minute
	// maxText bounds, in bytes, a text that a guest has chosen, with the words around it.
	maxText = 64 << 10
	maxCopy = 1 << 20
)

var asks = []asked{
	{"ping", false, &agentpb.PingResponse{Version: "v\x1b[2J", BootId: "b"}, func(ctx context.Context, c *guest.Client, _ string) (any, error) { return second(c.Ping(ctx)) }},
	{"resume", false, &agentpb.ResumeResponse{BootId: "b"}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return second(c.Resume(ctx, guest.Resume{}))
	}},
	{"stats", false, &agentpb.StatsResponse{}, func(ctx context.Context, c *guest.Client, _ string) (any, error) { return second(c.Stats(ctx)) }},
	{"hooks", false, &agentpb.HooksResponse{Failures: []*agentpb.HookFailure{{Name: "h", Problem: "p", Output: "\x1b"}}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return second(c.Hooks(ctx, guest.HookSleep, guest.HookLimits{All: fuzzTime}))
	}},
	{"freeze", false, &agentpb.FreezeResponse{Refused: true}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return second(c.Freeze(ctx, time.Second, guest.HookLimits{All: fuzzTime}))
	}},
	{"thaw", false, &agentpb.ThawResponse{FrozenNanos: -1}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return second(c.Thaw(ctx, guest.HookLimits{All: fuzzTime}))
	}},
	{"services", false, &agentpb.ListServicesResponse{Services: []*agentpb.ServiceState{{Name: "s", State: "x", Problem: "\n"}}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		list, err := c.Services(ctx)
		if len(list) > agentpb.MaxServices {
			panic("too many services")
		}
		return list, err
	}},
	{"wait for a service", false, &agentpb.ServiceState{Name: "s", Check: "\u202e"}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return second(c.WaitService(ctx, "s"))
	}},
	{"log of a service", false, &agentpb.ServiceLogResponse{Data: []byte("x"), Offset: 1, End: 2}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		data, _, _, err := c.ServiceLog(ctx, "s", 0, false)
		if len(data) > agentpb.MaxChunk {
			panic("too much of a log")
		}
		return nil, err
	}},
	{"stat", false, &agentpb.FileInfo{Name: "x", Mode: 0o100644}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		_, err := c.Stat(ctx, "/x")
		return nil, err
	}},
	{"read directory", false, &agentpb.ReadDirResponse{Entries: []*agentpb.FileInfo{{Name: "a"}, {Name: "b"}}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		list, err := c.ReadDir(ctx, "/x")
		for i, e := range list {
			if e.Name == "" || e.Name == "." || e.Name == ".." || strings.ContainsAny(e.Name, "/\x00") || i > 0 && e.Name <= list[i-1].Name {
				panic("an entry named " + e.Name)
			}
		}
		return nil, err
	}},
	{"read link", false, &agentpb.ReadlinkResponse{Target: "t"}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		_, err := c.Readlink(ctx, "/x")
		return nil, err
	}},
	{"look", false, &agentpb.DropResponse{NowNanos: 1, Paths: []*agentpb.DroppedPath{{State: "directory"}}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		list, err := c.Look(ctx, []string{"/x"})
		if err == nil && len(list) != 1 {
			panic("a look at another number of paths")
		}
		return nil, err
	}},
	{"drop", false, &agentpb.DropResponse{Paths: []*agentpb.DroppedPath{{Problem: "\x1b"}}, TrimProblem: "\x1b"}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return second(c.Drop(ctx, []guest.DropPath{{Path: "/x"}}, time.Second, true))
	}},
	{"changes", false, &agentpb.DiskChanges{Changes: []*agentpb.DiskChange{{Op: 1, Path: []byte("/a")}}, Partial: "\x1b"}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return second(c.Changes(ctx, 100, func(guest.Change) error { return nil }))
	}},
	{"list", false, &agentpb.ListResponse{Processes: []*agentpb.Process{{Id: "x"}}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		_, err := c.List(ctx)
		return nil, err
	}},
	{"kill", false, &agentpb.Empty{}, func(ctx context.Context, c *guest.Client, _ string) (any, error) { return nil, c.Kill(ctx, "x", 9) }},
	{"exec", true, &agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Started{Started: &agentpb.ExecStarted{Id: "x", Pid: 1}}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		_, err := c.Exec(ctx, sh("true"))
		return nil, err
	}},
	{"watch", true, &agentpb.WatchResponse{Ready: true}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return nil, c.Watch(ctx, guest.NewWatch([]string{"/x"}, true), nil, func(guest.WatchEvent) error { return nil })
	}},
	{"read", true, &agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: []byte("x")}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		n, err := c.ReadFile(ctx, "/x", io.Discard, 0, 100)
		if n > 100 {
			panic("more was read than asked for")
		}
		return nil, err
	}},
	{"write", true, &agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: &agentpb.TransferDone{}}}, func(ctx context.Context, c *guest.Client, _ string) (any, error) {
		return nil, c.WriteFile(ctx, "/x", strings.NewReader("content"), guest.WriteOptions{})
	}},
	{"copy out", true, &agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: linkThroughLink("x")}}, copyOut(false)},
	{"copy out, resumed", true, &agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: []byte("A\x00\x00\x00\x01x")}}, copyOut(true)},
	{"promote", true, &agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: linkThroughLink("x")}}, func(ctx context.Context, c *guest.Client, dir string) (any, error) {
		got, err := c.Promote(ctx, "copy", []guest.Promotion{{Path: "/x", Dir: dir}}, []guest.Seen{{State: guest.DropDirectory}}, math.MaxInt64)
		return got, err
	}},
}

func second[T any](v T, err error) (any, error) { return v, err }

func copyOut(resume bool) func(ctx context.Context, c *guest.Client, dir string) (any, error) {
	return func(ctx context.Context, c *guest.Client, dir string) (any, error) {
		res, err := c.CopyOut(ctx, "/x", dir+"/copy", guest.CopyOptions{Resume: resume, MaxBytes: maxCopy, MaxEntries: 100})
		if res.Bytes > maxCopy || res.Entries > 101 {
			panic("more was copied than allowed")
		}
		return res.Skipped, err
	}
}

// said returns what the guest sends to a call: raw bytes, or a well-framed answer with any content. In a stream
// the first byte of a piece gives its length.
func said(a asked, raw bool, in []byte) []byte {
	if raw {
		return in
	}
	if !a.stream {
		return frame(1, 2, 0, message(&ttrpc.Response{Payload: in}))
	}
	var out []byte
	for pieces := 0; len(in) > 0 && pieces < 64; pieces++ {
		n := min(int(in[0])*16, len(in)-1)
		out = append(out, frame(1, 3, 0, in[1:1+n])...)
		in = in[1+n:]
	}
	return append(out, frame(1, 2, 0, message(&ttrpc.Response{}))...)
}

// FuzzAgentAnswers has a guest answer calls with arbitrary bytes and hang up. The call must end, with bounded and
// printable texts and error. A copy must change nothing but itself.
func FuzzAgentAnswers(f *testing.F) {
	for i, a := range asks {
		m := message(a.seed)
		if a.stream {
			m = append([]byte{byte(len(m)/16 + 1)}, m...)
		}
		f.Add(byte(i), false, m)
		f.Add(byte(i), true, said(a, false, m))
	}
	f.Fuzz(func(t *testing.T, which byte, raw bool, in []byte) {
		if len(in) > 64<<10 {
			return
		}
		a := asks[int(which)%len(asks)]
		dir := t.TempDir()
		write(t, dir+"/bait", "safe", 0o600)
		words := said(a, raw, in)
		var wg sync.WaitGroup
		defer wg.Wait()
		c, err := guest.Dial(t.Context(), func(context.Context, uint32) (net.Conn, error) {
			host, evil := net.Pipe()
			wg.Go(func() {
				defer evil.Close()
				if _, err := evil.Read(make([]byte, 1)); err != nil {
					return
				}
				wg.Go(func() { _, _ = io.Copy(io.Discard, evil) })
				_, _ = evil.Write(words)
			})
			return host, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), fuzzTime)
		defer cancel()
		texts, err := a.call(ctx, c, dir)
		if ctx.Err() != nil {
			t.Fatalf("%s does not end: %v", a.name, err)
		}
		if err != nil && (len(err.Error()) > maxText || !shows(err.Error())) {
			t.Errorf("%s: an error of %d bytes: %q", a.name, len(err.Error()), err)
		}
		for _, s := range stringsOf(t, texts) {
			if len(s) > maxText || !shows(s) {
				t.Errorf("%s: a text of %d bytes: %q", a.name, len(s), s)
			}
		}
		if b, err := os.ReadFile(dir + "/bait"); err != nil || string(b) != "safe" {
			t.Errorf("%s: a file beside the copy is %q, %v", a.name, b, err)
		}
		for _, e := range entries(t, dir) {
			if e != "bait" && e != "copy" && !strings.HasPrefix(e, ".drowse-part-") {
				t.Errorf("%s has made %q", a.name, e)
			}
		}
	})
}

// shows reports whether a text has nothing that drives a terminal. Joined errors are on separate lines, and errors
// of package proto sometimes have a no-break space.
func shows(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r != '\n' && r != '\u00a0' && !unicode.IsPrint(r) })
}

// stringsOf returns the strings in a value.
func stringsOf(t *testing.T, v any) (list []string) {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		return nil // JSON does not have some numbers
	}
	var doc any
	if err := json.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case string:
			list = append(list, v)
		case []any:
			for _, e := range v {
				walk(e)
			}
		case map[string]any:
			for _, e := range v {
				walk(e)
			}
		}
	}
	walk(doc)
	slices.Sort(list)
	return list
}
