package e2b_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// envelope returns a message of a stream of the Connect protocol: flags, length, data.
func envelope(flags byte, data string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(data))), data...)
}

func gzipped(data []byte) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write(data) // a buffer takes all
	_ = z.Close()
	return b.Bytes()
}

// FuzzEnvd sends any body, in each coding and compression of the wire, to the calls of processes and files, and to
// uploads. Nothing panics, memory is bounded, and an error is one of the client or of the guest and says what it is.
func FuzzEnvd(f *testing.F) {
	h := (&sandboxtest.VMs{}).Host(f)
	keys := tokens.Open(filepath.Join(f.TempDir(), "tokens"))
	key, err := keys.CreateE2B(tokens.Token{Name: "test", Scopes: tokens.All()})
	if err != nil {
		f.Fatal(err)
	}
	var log bytes.Buffer // slog.TextHandler serializes writes
	s, err := e2b.New(e2b.Options{
		Host: h, Tokens: keys, Templates: map[string]string{"base": sandboxtest.Image}, Spec: sandbox.Spec{DiskMiB: 64},
		Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if err := s.Close(); err != nil {
			f.Error(err)
		}
	})
	var m struct{ SandboxID, EnvdAccessToken string }
	req := httptest.NewRequest(http.MethodPost, "/v2/sandboxes", strings.NewReader(`{"templateID":"base","timeout":86400}`))
	req.Header.Set("X-API-KEY", key)
	made := httptest.NewRecorder()
	if s.ServeHTTP(made, req); json.Unmarshal(made.Body.Bytes(), &m) != nil || made.Code != http.StatusCreated {
		f.Fatalf("%d %s", made.Code, made.Body)
	}

	var paths []string
	for service, methods := range map[string]string{
		"process.Process": "List Start Connect Update SendInput StreamInput SendSignal CloseStdin", "filesystem.Filesystem": "Stat MakeDir Move ListDir Remove WatchDir CreateWatcher GetWatcherEvents RemoveWatcher",
	} {
		for method := range strings.FieldsSeq(methods) {
			paths = append(paths, "/"+service+"/"+method)
		}
	}
	paths = append(paths, "/files", "/files?path=/tmp/one", "/files/compose")
	kinds := []string{
		"application/connect+json", "application/connect+proto", "application/json", "application/proto", "application/grpc+proto", "application/grpc+json", "application/grpc-web+proto",
		"multipart/form-data; boundary=b", "application/octet-stream",
	}
	part := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nhello\r\n--b--\r\n"
	start := `{"process":{"cmd":"echo","args":["x"]},"stdin":false}`
	zeros := gzipped(make([]byte, 64<<20))
	for _, seed := range []struct {
		path, kind string
		zip        bool
		body       []byte
	}{
		{"/process.Process/Start", kinds[0], false, envelope(0, start)},
		{"/process.Process/Start", kinds[0], true, envelope(1, string(gzipped([]byte(start))))},
		{"/process.Process/Start", kinds[0], true, envelope(1, string(zeros))},
		{"/process.Process/Start", kinds[1], false, envelope(0, "\x0a\x06\x0a\x04echo")},
		{"/process.Process/Start", kinds[4], false, envelope(0, "\x0a\x06\x0a\x04true")},
		{"/process.Process/StreamInput", kinds[0], false, append(envelope(0, `{"start":{"process":{"pid":1}}}`), envelope(0, `{"data":{"input":{"stdin":"eA=="}}}`)...)},
		{"/process.Process/StreamInput", kinds[0], false, append(envelope(0, `{"keepalive":{}}`), envelope(2, `{}`)...)},
		{"/process.Process/StreamInput", kinds[1], false, []byte{0, 0xff, 0xff, 0xff, 0xff, 0}},
		{"/process.Process/List", kinds[2], false, []byte(`{}`)},
		{"/process.Process/SendInput", kinds[2], true, zeros},
		{"/process.Process/SendSignal", kinds[3], false, []byte("\x0a\x02\x08\x01\x10\x09")},
		{"/filesystem.Filesystem/Stat", kinds[2], false, []byte(`{"path":"/etc"}`)},
		{"/filesystem.Filesystem/ListDir", kinds[2], false, []byte(`{"path":"/","depth":4294967295}`)},
		{"/filesystem.Filesystem/WatchDir", kinds[0], false, envelope(0, `{"path":"/tmp","recursive":true}`)},
		{"/filesystem.Filesystem/Move", kinds[2], false, []byte(`{"source":"/tmp","destination":"/tmp/x"}`)},
		{"/files", kinds[7], false, []byte(part)}, {"/files", kinds[7], true, gzipped([]byte(part))}, {"/files", kinds[7], false, []byte("--b\r\n\r\n--b")},
		{"/files?path=/tmp/one", kinds[8], false, []byte("x")}, {"/files?path=/tmp/one", kinds[8], true, []byte{0x1f, 0x8b}},
		{"/files/compose", kinds[2], false, []byte(`{"source_paths":["/tmp/one"],"destination":"/tmp/two"}`)},
	} {
		for p, path := range paths {
			for k, kind := range kinds {
				if path == seed.path && kind == seed.kind {
					f.Add(uint8(p), uint8(k), seed.zip, seed.body)
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, path, kind uint8, zip bool, body []byte) {
		if len(body) > 256<<10 {
			return
		}
		where, coding := paths[int(path)%len(paths)], kinds[int(kind)%len(kinds)]
		// Streams last until their client goes.
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, where, bytes.NewReader(body))
		headers(r.Header, m.SandboxID, m.EnvdAccessToken)
		r.Header.Set("Content-Type", coding)
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0 // for gRPC
		if name := "Content-Encoding"; zip {
			switch {
			case strings.Contains(coding, "connect+"):
				name = "Connect-Content-Encoding"
			case strings.Contains(coding, "grpc"):
				name = "Grpc-Encoding"
			}
			r.Header.Set(name, "gzip")
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		runtime.ReadMemStats(&after)
		// Twice the longest message for each of those that are read, and what else runs in the process.
		if most := uint64(64<<20 + 64*len(body)); after.TotalAlloc-before.TotalAlloc > most {
			t.Errorf("%s %s: %d bytes take %d of memory", where, coding, len(body), after.TotalAlloc-before.TotalAlloc)
		}
		what := fmt.Sprintf("%s %s: %d %.200q", where, coding, w.Code, w.Body)
		if w.Code == http.StatusInternalServerError || w.Body.Len() > 4<<20 || log.Len() > 0 {
			t.Fatalf("%s; the log: %s", what, &log)
		}
		answer := w.Body.Bytes()
		if strings.Contains(coding, "connect+") && w.Code == http.StatusOK {
			for len(answer) >= 5 {
				n := int(binary.BigEndian.Uint32(answer[1:]))
				if n > len(answer)-5 {
					t.Fatalf("%s: a bad envelope", what)
				}
				if answer[0]&2 != 0 {
					var end struct {
						Error *struct{ Code, Message string }
					}
					if err := json.Unmarshal(answer[5:5+n], &end); err != nil {
						t.Fatalf("%s: %v", what, err)
					}
					// The server logs its own failures. The library calls a cut envelope an internal error.
					if end.Error != nil && (end.Error.Code == "" || end.Error.Message == "") {
						t.Fatalf("%s: %+v", what, *end.Error)
					}
				}
				answer = answer[5+n:]
			}
			if len(answer) > 0 {
				t.Fatalf("%s: %d bytes are left", what, len(answer))
			}
		}
		if w.Code >= 400 && w.Code != http.StatusUnsupportedMediaType {
			var e struct {
				Code    any // a word of Connect, or a plain request's status
				Message string
			}
			if err := json.Unmarshal(answer, &e); err != nil || e.Code == nil || e.Code == "" || e.Message == "" {
				t.Fatalf("%s: %v", what, err)
			}
		}
	})
}
