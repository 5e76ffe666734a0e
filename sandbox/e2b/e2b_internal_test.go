package e2b

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
)

func TestMain(m *testing.M) { guesttest.Main(m) }

func newHub(t *testing.T) *hub {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
	s := &Server{life: t.Context(), slow: 20 * time.Millisecond, hubs: map[hubKey]*hub{}}
	return &hub{s: s, subs: map[*sub]bool{}, inputs: make(chan struct{}, 1), ready: make(chan struct{})}
}

// follows takes a follower's events until it ends or is left behind.
func follows(f *sub) (bytes int, behind bool) {
	for {
		select {
		case e, ok := <-f.events:
			if !ok {
				return bytes, false
			}
			bytes += len(e.GetData().GetStdout())
		case <-f.slow:
			return bytes, true
		}
	}
}

func TestHub_leaves_a_follower_behind_that_reads_nothing_once_another_follows(t *testing.T) {
	h := newHub(t)
	dead, leaveDead, _ := h.hold(true)
	written := make(chan int, 1)
	const chunks = 10 * subDepth
	go func() {
		n := 0
		for range chunks {
			m, _ := output{h, false}.Write([]byte("x"))
			n += m
		}
		written <- n
		h.mu.Lock()
		defer h.mu.Unlock()
		for f := range h.subs {
			close(f.events)
		}
	}()
	select {
	case <-written:
		t.Fatal("output was dropped, or held without a bound")
	case <-time.After(10 * h.s.slow):
		// Alone, it stalls the process, as a full pipe does.
	}
	alive, leave, _ := h.hold(true)
	n, behind := follows(alive)
	if behind || n == 0 {
		t.Error("the one that reads:", n, behind)
	}
	if n := <-written; n != chunks {
		t.Error(n)
	}
	if _, behind := follows(dead); !behind {
		t.Error("the one that reads nothing was not left behind")
	}
	leaveDead()
	leave()
	h.idle.Stop()
}

func TestHub_gives_all_output_to_each_of_many_followers(t *testing.T) {
	h := newHub(t)
	h.s.slow = time.Minute
	const followers, chunks = 8, 500
	got := make(chan int, followers)
	var leaves []func()
	for range followers {
		f, leave, _ := h.hold(true)
		leaves = append(leaves, leave)
		go func() {
			n, _ := follows(f)
			got <- n
		}()
	}
	for range chunks {
		_, _ = output{h, false}.Write(make([]byte, 10))
	}
	h.mu.Lock()
	for f := range h.subs {
		close(f.events)
	}
	h.mu.Unlock()
	for range followers {
		if n := <-got; n != 10*chunks {
			t.Error(n)
		}
	}
	for _, leave := range leaves {
		leave()
	}
	h.idle.Stop()
}

func TestEnd_of_a_process_is_told_in_the_words_of_the_clients(t *testing.T) {
	for want, st := range map[string]*guest.ExitStatus{
		"0 true exit status 0 <none>":            {},
		"3 true exit status 3 exit status 3":     {Code: 3},
		"-1 false signal: killed signal: killed": {Code: 137, Signal: 9},
	} {
		end := endOf(st).GetEnd()
		text := "<none>"
		if end.Error != nil {
			text = *end.Error
		}
		if got := fmt.Sprint(end.ExitCode, " ", end.Exited, " ", end.Status, " ", text); got != want {
			t.Errorf("%+v: %s, want %s", st, got, want)
		}
	}
}

func TestPolicy_denies_what_the_client_wants_denied(t *testing.T) {
	yes, no := true, false
	for name, c := range map[string]struct {
		body     networkBody
		internet *bool
		want     string // rules, and whether names are resolved
	}{
		"nothing":            {networkBody{}, nil, "internet:allow dns"},
		"no Internet":        {networkBody{}, &no, ""},
		"Internet":           {networkBody{}, &yes, "internet:allow dns"},
		"the body's own":     {networkBody{InternetAccess: &no}, &yes, ""},
		"one denied":         {networkBody{DenyOut: []string{"8.8.8.8"}}, nil, "denyOut:reject internet:allow dns"},
		"all denied":         {networkBody{DenyOut: []string{"0.0.0.0/0"}}, nil, "denyOut:reject"},
		"one allowed of all": {networkBody{AllowOut: []string{"1.1.1.1"}, DenyOut: []string{"0.0.0.0/0"}}, nil, "allowOut:allow denyOut:reject"},
		"a name of all":      {networkBody{AllowOut: []string{"*.Example.com"}, DenyOut: []string{"0.0.0.0/0"}}, nil, "allowOut:allow denyOut:reject dns"},
		"allowed without it": {networkBody{AllowOut: []string{"1.1.1.0/24"}}, &no, "allowOut:allow"},
	} {
		n, err := c.body.network(c.internet, true)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		p := policy(n, &netpolicy.DNS{})
		var got []string
		for _, r := range p.Rules {
			got = append(got, fmt.Sprint(r.Name, ":", r.Verdict))
		}
		if p.DNS != nil {
			got = append(got, "dns")
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%s: %s, want %s", name, text, c.want)
		}
	}
}

func TestTag_of_a_process_is_in_its_id(t *testing.T) {
	for _, tag := range []string{"a", "a b", "ä/..\x00", strings.Repeat("x", maxTag)} {
		id, err := processID(&tag)
		if got, ok := tagOf(id); err != nil || !ok || got == nil || *got != tag {
			t.Errorf("%q: %s %v %v", tag, id, got, err)
		}
	}
	if id, err := processID(nil); err != nil {
		t.Error(err)
	} else if tag, ok := tagOf(id); tag != nil || !ok {
		t.Error(id, tag, ok)
	}
	for _, tag := range []string{"", strings.Repeat("x", maxTag+1)} {
		if id, err := processID(&tag); err == nil {
			t.Error(id)
		}
	}
	for _, id := range []string{"", "e2b-", "e2b-short", "other", "e2b-abcdefghij-*", "e2b-abcdefghijk", "e2b-abcdefghij-_w"} {
		if tag, ok := tagOf(id); ok {
			t.Errorf("%q is one of the wire, with %v", id, tag)
		}
	}
}

func TestEvent_is_told_from_the_watched_directory(t *testing.T) {
	for _, c := range []struct {
		e    guest.WatchEvent
		want []string
	}{
		{guest.WatchEvent{Kind: guest.WatchCreated, Path: "/d/a"}, []string{"CREATE a"}},
		{guest.WatchEvent{Kind: guest.WatchRenamed, From: "/d/a", Path: "/d/s/b"}, []string{"RENAME a", "CREATE s/b"}},
		{guest.WatchEvent{Kind: guest.WatchRenamed, From: "/x", Path: "/d/b"}, []string{"CREATE b"}},
		{guest.WatchEvent{Kind: guest.WatchRemoved, Path: "/d"}, []string{"REMOVE d"}},
		{guest.WatchEvent{Kind: guest.WatchWritten, Path: "/dd/a"}, nil},
		{guest.WatchEvent{Kind: guest.WatchWritten, Path: "/d/\xff"}, []string{"WRITE \uFFFD"}},
	} {
		var got []string
		for _, e := range eventsOf("/d", c.e) {
			got = append(got, strings.TrimPrefix(e.Type.String(), "EVENT_TYPE_")+" "+e.Name)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q", c.e, got)
		}
	}
}

func FuzzBody(f *testing.F) {
	for _, s := range []string{
		`{"templateID":"base"}`, `{"templateID":"b","network":{"allowOut":["*.a.b","1.2.3.4/8","::/0"],"denyOut":["0.0.0.0/0"]},"allow_internet_access":false}`,
		`{"templateID":"b","autoPause":true,"autoResume":{"enabled":true},"timeout":1}`, `{"iam":{}}`, `{"x":1}`, `[]`, `{"envVars":{"A":"b"},"metadata":{"a":"b"}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var b createBody
		if answers.Parse(data, &b) != nil || b.check() != nil {
			return
		}
		if b.Network == nil {
			b.Network = &networkBody{}
		}
		n, err := b.Network.network(b.Internet, true)
		if err != nil {
			return
		}
		if b.TemplateID == "" || b.AutoResume != nil && b.AutoResume.Enabled && !b.AutoPause {
			t.Fatal("accepted")
		}
		p := policy(n, &netpolicy.DNS{})
		if err := p.Validate(); err != nil {
			t.Fatal(err)
		}
		last := len(p.Rules) - 1
		if deniesAll(n) && last >= 0 && p.Rules[last].Name == "internet" {
			t.Fatal("the Internet is allowed")
		}
	})
}

func FuzzRoute(f *testing.F) {
	for _, s := range [][3]string{
		{"49983-abc.d.test", "", ""}, {"", "abc", "49983"}, {"d.test", "abc", ""}, {"80-abc.d.test:99", "abc", "80"}, {"api.d.test", "", ""}, {"80-ABC.D.TEST.", "", ""}, {"80-a.b.d.test", "../x", "-1"},
	} {
		f.Add(s[0], s[1], s[2])
	}
	s := &Server{o: Options{Domain: "d.test:99"}}
	f.Fuzz(func(t *testing.T, host, id, port string) {
		h := http.Header{}
		if id != "" {
			h.Set(headerSandbox, id)
		}
		if port != "" {
			h.Set(headerPort, port)
		}
		to, named, err := s.routeOf(&http.Request{Host: host, Header: h})
		switch {
		case err != nil:
			return
		case !named && (id != "" || port != ""):
			t.Fatal("a request with a header is the control plane's")
		case named && (!idRE.MatchString(to.Sandbox) || to.Port == 0):
			t.Fatal(to)
		case id != "" && to.Sandbox != id:
			t.Fatalf("%q is %q", id, to.Sandbox)
		}
		by, hosted, err := s.routeOfHost(host)
		if err != nil || hosted && by != to {
			t.Fatalf("%q and %q %q: %v, %v", host, id, port, by, err)
		}
	})
}

func TestMetadata_of_an_upload_is_refused_beyond_its_bounds(t *testing.T) {
	for name, tt := range map[string]struct {
		header http.Header
		want   string // of the attributes, or of the error
	}{
		"none":            {http.Header{"X-Other": {"a"}}, "map[]"},
		"case is lost":    {http.Header{"X-Metadata-Author-Name": {"A b"}}, "map[user.e2b.author-name:A b]"},
		"no key":          {http.Header{"X-Metadata-": {"a"}}, "0 bytes"},
		"a long key":      {http.Header{"X-Metadata-" + strings.Repeat("K", maxMetadataKey+1): {"a"}}, "247 bytes"},
		"the longest key": {http.Header{"X-Metadata-" + strings.Repeat("K", maxMetadataKey): {""}}, "map[user.e2b." + strings.Repeat("k", 246) + ":]"},
		"two values":      {http.Header{"X-Metadata-A": {"a", "b"}}, "two values"},
		"not ASCII":       {http.Header{"X-Metadata-A": {"\xc3\xa4"}}, "printable"},
		"too much":        {http.Header{"X-Metadata-A": {strings.Repeat("x", 2048)}, "X-Metadata-B": {strings.Repeat("x", 2048)}}, "4096"},
	} {
		a, err := metadataOf(tt.header)
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprintf("%s", a.Values)
		}
		if !strings.Contains(got, tt.want) {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

func TestAttack_watchers_of_an_owner_leave_none_to_others(t *testing.T) {
	s := &Server{watchers: map[string]*watcher{}}
	n := 0
	for ; n < 2*maxWatchers; n++ {
		if !s.addWatcher(fmt.Sprint("ann", n), &watcher{box: fmt.Sprint(n / maxWatchersOf), owner: "ann"}) {
			break
		}
	}
	if n != maxWatchers/2 {
		t.Errorf("an owner has %d of %d watchers", n, maxWatchers)
	}
	for _, owner := range []string{"bob", ""} {
		if !s.addWatcher("of "+owner, &watcher{box: "of " + owner, owner: owner}) {
			t.Errorf("owner %q has none", owner)
		}
	}
}
