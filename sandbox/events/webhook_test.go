package events

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var testSecret = []byte("0123456789abcdef")

// A receiver is a webhook whose answers a test chooses.
type receiver struct {
	*httptest.Server
	mu     sync.Mutex
	answer func(w http.ResponseWriter, r *http.Request, n int)
	n      int
	bad    []string
	got    chan Event // events answered with 200
}

func newReceiver(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, n int)) *receiver {
	v := &receiver{answer: answer, got: make(chan Event, 100)}
	v.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var e Event
		if err = errors.Join(err, json.Unmarshal(body, &e)); err != nil {
			return // the sender has given up
		}
		v.mu.Lock()
		v.n++
		n := v.n
		if r.Method != http.MethodPost || r.Header.Get(SignatureHeader) != Sign(testSecret, r.Header.Get(TimestampHeader), body) || r.Header.Get(IDHeader) != e.ID {
			v.bad = append(v.bad, string(body))
		}
		v.mu.Unlock()
		rec := httptest.NewRecorder()
		v.answer(rec, r, n)
		if rec.Code == http.StatusOK {
			v.got <- e
		}
		for k, h := range rec.Header() {
			w.Header()[k] = h
		}
		w.WriteHeader(rec.Code)
	}))
	v.Config.ErrorLog = log.New(io.Discard, "", 0)
	v.StartTLS()
	t.Cleanup(v.Close)
	return v
}

func (v *receiver) delivery(j *Journal, dir string) *Delivery {
	return &Delivery{
		Journal: j, Dir: dir, Webhook: Webhook{URL: v.URL, Secret: testSecret},
		client: v.Client(), pause: time.Millisecond, timeout: time.Minute,
	}
}

// run delivers until stop is called, which returns Run's error.
func run(t *testing.T, d *Delivery) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	var err error
	once := sync.OnceFunc(func() { cancel(); err = <-done })
	t.Cleanup(once)
	return func() error { once(); return err }
}

func TestA_webhook_that_fails_hangs_and_redirects_gets_all_in_order(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	v := newReceiver(t, func(w http.ResponseWriter, r *http.Request, n int) {
		switch n {
		case 1, 2:
			w.WriteHeader(http.StatusInternalServerError)
		case 3:
			select { // the sender gives up first
			case <-r.Context().Done():
			case <-release:
			}
			w.WriteHeader(http.StatusInternalServerError)
		case 5:
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}
	})
	j := Open(t.TempDir(), Options{})
	d := v.delivery(j, t.TempDir())
	d.timeout = 2 * time.Second
	if err := d.save(0); err != nil {
		t.Fatal(err)
	}
	es := mustAppend(t, j, "a", "b", "c")
	stop := run(t, d)
	last := ""
	for _, want := range es {
		got := <-v.got
		for got.ID == last { // the sender repeats an event whose answer came too late
			got = <-v.got
		}
		if last = got.ID; got.ID != want.ID {
			t.Fatalf("got %s, want %s", got.Sandbox, want.Sandbox)
		}
	}
	if err := stop(); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if len(v.bad) > 0 {
		t.Fatalf("badly signed: %v", v.bad)
	}
	if v.n < 7 { // three events and four failures
		t.Fatalf("%d attempts", v.n)
	}
}

func TestA_webhook_goes_on_after_a_restart_where_it_was(t *testing.T) {
	v := newReceiver(t, func(http.ResponseWriter, *http.Request, int) {})
	j, dir := Open(t.TempDir(), Options{}), t.TempDir()
	mustAppend(t, j, "before it was there")
	stop := run(t, v.delivery(j, dir))
	for {
		if _, err := os.Stat(v.delivery(j, dir).path()); err == nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	mustAppend(t, j, "a")
	if got := <-v.got; got.Sandbox != "a" {
		t.Fatalf("got %s", got.Sandbox)
	}
	_ = stop()
	mustAppend(t, j, "b", "c")
	_ = run(t, v.delivery(j, dir))
	var got []string
	for len(got) < 2 || got[len(got)-1] != "c" {
		got = append(got, (<-v.got).Sandbox)
	}
	// The event whose answer the end of the first delivery cut off may come again.
	got = slices.DeleteFunc(got, func(s string) bool { return s == "a" })
	want(t, got, "b", "c")
}

func TestTwo_do_not_deliver_to_one_webhook(t *testing.T) {
	v := newReceiver(t, func(http.ResponseWriter, *http.Request, int) {})
	j, dir := Open(t.TempDir(), Options{}), t.TempDir()
	d := v.delivery(j, dir)
	if err := d.save(0); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, j, "a")
	_ = run(t, d)
	<-v.got // this delivery has the lock
	if err := v.delivery(j, dir).Run(t.Context()); !errors.Is(err, ErrDelivered) {
		t.Fatal(err)
	}
}

func TestA_certificate_that_is_not_trusted_gets_nothing(t *testing.T) {
	v := newReceiver(t, func(http.ResponseWriter, *http.Request, int) {})
	d := v.delivery(Open(t.TempDir(), Options{}), t.TempDir())
	if err := d.deliver(t.Context(), &http.Client{Transport: &http.Transport{}}, Event{ID: "x"}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Fatal(err)
	}
	if v.n != 0 {
		t.Fatal("it was asked")
	}
}

func TestWebhooks_that_are_refused(t *testing.T) {
	for name, w := range map[string]Webhook{
		"plain http to elsewhere": {URL: "http://example.com/x", Secret: testSecret},
		"a user":                  {URL: "https://u:p@example.com/x", Secret: testSecret},
		"no host":                 {URL: "https:///x", Secret: testSecret},
		"another scheme":          {URL: "file:///etc/passwd", Secret: testSecret},
		"a short secret":          {URL: "https://example.com/x", Secret: testSecret[1:]},
		"no such type":            {URL: "https://example.com/x", Secret: testSecret, Filter: Filter{Types: []string{"x"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := w.Check(); !errors.Is(err, ErrInvalid) {
				t.Fatal(err)
			}
		})
	}
	if err := (Webhook{URL: "http://127.0.0.1:8080/x", Secret: testSecret}).Check(); err != nil {
		t.Fatal(err)
	}
}

func TestA_secret_that_others_may_read_is_refused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, append(slices.Clone(testSecret), '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := ReadSecret(path)
	if err != nil || string(got) != string(testSecret) {
		t.Fatalf("%q, %v", got, err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadSecret(path); !errors.Is(err, ErrInvalid) {
		t.Fatal(err)
	}
}

func get(t *testing.T, s *httptest.Server, query, accept string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", accept)
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestEvents_by_HTTP(t *testing.T) {
	j := Open(t.TempDir(), Options{})
	es := mustAppend(t, j, "a", "b")
	s := httptest.NewServer(Handler(j, func(w http.ResponseWriter, err error) { http.Error(w, err.Error(), http.StatusBadRequest) }))
	defer s.Close()
	if code, body := get(t, s, "/?sandbox=b", ""); code != 200 || strings.Count(body, "\n") != 1 || !strings.Contains(body, es[1].ID) {
		t.Fatalf("%d %s", code, body)
	}
	if code, body := get(t, s, "/", "text/event-stream"); code != 200 || !strings.HasPrefix(body, "id: ") || strings.Count(body, "\n\n") != 2 ||
		!strings.Contains(body, "\nevent: sandbox.woken\ndata: {") {
		t.Fatalf("%d %s", code, body)
	}
	for _, bad := range []string{"/?since=x", "/?type=nothing", "/?follow=perhaps", "/?sincee=1", "/?since=99999999999999999999"} {
		if code, body := get(t, s, bad, ""); code != 400 {
			t.Fatalf("%s: %d %s", bad, code, body)
		}
	}
	// A follower gets the events after its last one.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/?follow=1&since=now", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	c := mustAppend(t, j, "c")[0]
	var e Event
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.ID != c.ID {
		t.Fatalf("%+v, %v", e, err)
	}
	cancel()
	s.Client().CloseIdleConnections()
}

func TestDeliverAll_one_more_than_there_may_be_is_refused(t *testing.T) {
	var hooks []Webhook
	for i := range MaxWebhooks + 1 {
		hooks = append(hooks, Webhook{URL: fmt.Sprintf("https://127.0.0.1:1/%d", i), Secret: testSecret})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := DeliverAll(ctx, nil, t.TempDir(), hooks, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("%d webhooks: %v, want ErrInvalid", len(hooks), err)
	}
}
