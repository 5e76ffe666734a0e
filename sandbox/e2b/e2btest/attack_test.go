package e2btest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/e2b/templates"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// keyOf returns a key of an owner, which does all but what is the operator's.
func (w *world) keyOf(owner string) string {
	w.t.Helper()
	key, err := w.tokens.CreateE2B(tokens.Token{Name: owner, Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}, Owner: owner})
	if err != nil {
		w.t.Fatal(err)
	}
	return key
}

// snapshotBy has a key take a snapshot, with a name, of a new sandbox.
func (w *world) snapshotBy(key, name string) string {
	w.t.Helper()
	var m made
	if a := w.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base"}, "X-API-KEY", key); a.status != http.StatusCreated || json.Unmarshal([]byte(a.body), &m) != nil {
		w.t.Fatal(a)
	}
	var snap struct{ SnapshotID string }
	if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/snapshots", map[string]any{"name": name}, "X-API-KEY", key); a.status != http.StatusCreated || json.Unmarshal([]byte(a.body), &snap) != nil {
		w.t.Fatal(a)
	}
	return strings.TrimSuffix(snap.SnapshotID, ":default")
}

func TestAttack_owner_tags_a_snapshot_as_the_template_of_another(t *testing.T) {
	w := begin(t, nil, nil)
	ann, bob := w.keyOf("ann"), w.keyOf("bob")
	hers, his := w.snapshotBy(ann, "app"), w.snapshotBy(bob, "mine")
	own := api.New(api.Options{Host: w.host, Tokens: w.tokens})
	tag := func(key, id string, tags []string) int {
		body, err := json.Marshal(wire.Tags{Tags: tags})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequestWithContext(t.Context(), "POST", "http://localhost/v1/snapshots/"+id+"/tags", bytes.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+key)
		r.Header.Set("Content-Type", "application/json")
		a := httptest.NewRecorder()
		own.ServeHTTP(a, r)
		return a.Code
	}
	sum := sha256.Sum256([]byte("ann"))
	forged := []string{"e2b", "e2b-owner=" + hex.EncodeToString(sum[:16]), "e2b-name=app"}
	if got := templates.SnapshotTags("ann", "app"); strings.Join(got, ",") != strings.Join(forged, ",") {
		t.Fatal("the tags of her snapshots are others now:", got)
	}
	if code := tag(bob, his, forged); code != http.StatusForbidden {
		t.Errorf("an owner gives a snapshot the tags of another's template: %d", code)
	}
	if code := tag(bob, his, []string{"e2b", "e2b-name=mine"}); code != http.StatusForbidden {
		t.Errorf("an owner makes a snapshot one of keys without an owner: %d", code)
	}
	var m made
	if a := w.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "app", "envVars": map[string]string{"KEY": "secret"}}, "X-API-KEY", ann); a.status != http.StatusCreated || json.Unmarshal([]byte(a.body), &m) != nil {
		t.Fatal(a)
	}
	if r, err := w.host.State.Get(m.SandboxID); err != nil || r.Parent != hers {
		t.Errorf("her sandbox is a copy of his: %+v %v", r, err)
	}
	// What a snapshot has it may keep, and other words are free.
	info, err := w.host.State.Snapshots()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range info {
		if i.ID == his {
			if code := tag(bob, his, append(i.Tags, "release")); code != http.StatusOK {
				t.Errorf("an owner may not tag a snapshot of the wire: %d", code)
			}
		}
	}
	if code := tag(bob, his, nil); code != http.StatusOK {
		t.Errorf("an owner may not take tags away: %d", code)
	}
}

func TestAttack_owner_names_a_snapshot_like_what_a_key_without_an_owner_asks_for(t *testing.T) {
	w := begin(t, nil, nil)
	his := w.snapshotBy(w.keyOf("bob"), sandboxtest.Image)
	from := func(template string) string {
		t.Helper()
		r, err := w.host.State.Get(w.create(map[string]any{"templateID": template}).SandboxID)
		if err != nil {
			t.Fatal(err)
		}
		return r.Parent
	}
	if got := from(sandboxtest.Image); got != "" {
		t.Errorf("an image's name is another owner's snapshot %s", got)
	}
	ours := w.snapshotBy(w.key, sandboxtest.Image)
	w.snapshotBy(w.keyOf("ann"), sandboxtest.Image) // later
	if got := from(sandboxtest.Image); got != ours {
		t.Errorf("a name is %s and not the key's own snapshot %s", got, ours)
	}
	if got := from(his); got != his {
		t.Errorf("an owner's snapshot by its id is %q", got)
	}
}

func TestAttack_owner_opens_private_addresses_by_the_network_of_a_sandbox(t *testing.T) {
	w := begin(t, nil, nil)
	ann := w.keyOf("ann")
	private := map[string]any{"allowOut": []string{"10.0.0.0/8"}}
	create := func(key string, network map[string]any) int {
		return w.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base", "network": network}, "X-API-KEY", key).status
	}
	if got := create(ann, private); got != http.StatusForbidden {
		t.Error("a new sandbox:", got)
	}
	if got := create(ann, map[string]any{"allowOut": []string{"1.1.1.1"}, "denyOut": []string{"0.0.0.0/0", "10.0.0.0/8"}}); got != http.StatusCreated {
		t.Error("a public address:", got)
	}
	if got := create(w.key, private); got != http.StatusCreated {
		t.Error("a key without an owner:", got)
	}
	var m made
	if a := w.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base"}, "X-API-KEY", ann); json.Unmarshal([]byte(a.body), &m) != nil {
		t.Fatal(a)
	}
	for key, want := range map[string]int{ann: http.StatusForbidden, w.key: http.StatusNoContent} {
		if a := w.ask("PUT", "/sandboxes/"+m.SandboxID+"/network", private, "X-API-KEY", key); a.status != want {
			t.Error("another network:", a)
		}
	}
}

// unsent sends the head of a request whose body of so many bytes does not come. Its connection stays open.
func (w *world) unsent(line, key string, bytes int64) net.Conn {
	w.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: x\r\nX-API-KEY: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", line, key, bytes)
	return c
}

func TestAttack_slow_bodies_of_an_owner_take_the_control_plane_from_others(t *testing.T) {
	w := begin(t, nil, nil)
	ann, bob := w.keyOf("ann"), w.keyOf("bob")
	for range 300 { // more than the control plane has places
		w.unsent("POST /v2/sandboxes", ann, 100)
	}
	w.until("the owner has no more places", func() bool {
		return w.ask("GET", "/v2/sandboxes", nil, "X-API-KEY", ann).status == http.StatusTooManyRequests
	})
	for _, key := range []string{bob, w.key} {
		if a := w.ask("GET", "/v2/sandboxes", nil, "X-API-KEY", key); a.status != http.StatusOK {
			t.Error("others:", a)
		}
	}
}

func TestAttack_slow_starts_of_an_owner_keep_others_from_starting(t *testing.T) {
	w := begin(t, nil, nil)
	ann, bob := w.keyOf("ann"), w.keyOf("bob")
	const starts = 40 // more than there are places
	hers, held, begun := make(chan int, starts), make(chan struct{}), make(chan struct{}, 100*starts)
	w.vms.Fail = func(_, name string) error {
		if m, err := w.host.State.Metadata(name); err == nil && m.Owner == "ann" {
			begun <- struct{}{}
			<-held
		}
		return nil
	}
	create := func(key string) int {
		return w.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base"}, "X-API-KEY", key).status
	}
	for range starts {
		go func() { hers <- create(ann) }()
	}
	refused := 0
	for going := 0; going+refused < starts; {
		select {
		case <-begun:
			going++
		case code := <-hers:
			if refused++; code != http.StatusTooManyRequests {
				t.Errorf("a start beyond the owner's places: %d", code)
			}
		}
	}
	for _, key := range []string{bob, w.key} {
		if code := create(key); code != http.StatusCreated {
			t.Error("others:", code)
		}
	}
	close(held)
	for range starts - refused {
		if code := <-hers; code != http.StatusCreated {
			t.Error("a start that had a place:", code)
		}
	}
}

func TestAttack_uploads_of_an_owner_leave_no_bytes_to_others(t *testing.T) {
	w := begin(t, nil, nil)
	ann, bob := w.keyOf("ann"), w.keyOf("bob")
	link := func(key string, b requested, hash string) string {
		t.Helper()
		var link struct{ URL string }
		if a := w.ask("GET", "/templates/"+b.TemplateID+"/files/"+hash, nil, "X-API-KEY", key); json.Unmarshal([]byte(a.body), &link) != nil || link.URL == "" {
			t.Fatal(a)
		}
		return strings.TrimPrefix(link.URL, w.url)
	}
	hers, his := w.request(ann, "a"), w.request(bob, "b")
	for i := range 5 { // what all have together, and more: the bytes are reserved before they come
		w.unsent("PUT "+link(ann, hers, fmt.Sprint(i)), "", 1<<30)
	}
	w.until("the owner has no more bytes", func() bool {
		return w.upload(ann, hers, "last", []byte("x")).status == http.StatusTooManyRequests
	})
	if a := w.upload(bob, his, "h", []byte("x")); a.status != http.StatusOK {
		t.Error("others:", a)
	}
}
