package builder

import (
	"bytes"
	"context"
	"encoding/base64"
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

	hubd "github.com/google/go-containerregistry/pkg/registry"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
)

// A hub is a registry on this host whose answers a test can spoil.
type hub struct {
	*httptest.Server
	mu    sync.Mutex                                                      // guards the rest
	spoil func(w http.ResponseWriter, r *http.Request, next http.Handler) // nil: nothing is spoilt
	asked map[string]int                                                  // requests by method and path
}

func newHub(t *testing.T) *hub {
	t.Helper()
	// The tests must not use the credentials of the user who runs them.
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	t.Setenv("REGISTRY_AUTH_FILE", filepath.Join(t.TempDir(), "none"))
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	h := &hub{asked: map[string]int{}}
	inner := hubd.New(hubd.Logger(log.New(io.Discard, "", 0)))
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		h.asked[r.Method+" "+r.URL.Path]++
		spoil := h.spoil
		h.mu.Unlock()
		if spoil != nil {
			spoil(w, r, inner)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *hub) set(spoil func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.spoil, h.asked = spoil, map[string]int{}
}

// count returns the number of requests whose method and path contain a text.
func (h *hub) count(text string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for k, v := range h.asked {
		if strings.Contains(k, text) {
			n += v
		}
	}
	return n
}

func (h *hub) host() string { return strings.TrimPrefix(h.URL, "http://") }

func (h *hub) do(t *testing.T, method, path, contentType string, body []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, h.URL+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := h.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode/100 != 2 {
		t.Fatalf("%s %s: %s %s (%v)", method, path, resp.Status, text, err)
	}
}

// push puts an image into the registry and returns the digest of its manifest.
func (h *hub) push(t *testing.T, repo, tag string, r recipe) string {
	t.Helper()
	f := ociFiles{}
	d := r.manifest(t, f)
	digest := d["digest"].(string)
	manifest := "blobs/" + strings.Replace(digest, ":", "/", 1)
	for name, b := range f {
		if name != manifest {
			h.do(t, http.MethodPost, "/v2/"+repo+"/blobs/uploads/?digest="+digestOf(b), "application/octet-stream", b)
		}
	}
	h.do(t, http.MethodPut, "/v2/"+repo+"/manifests/"+tag, typeManifest, f[manifest])
	return digest
}

// noPause does not wait, and records how long each wait should have been.
type noPause struct {
	mu   sync.Mutex
	list []time.Duration
}

func (p *noPause) pause(ctx context.Context, d time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.list = append(p.list, d)
	return context.Cause(ctx)
}

func TestRegistry_image_is_that_of_its_layout(t *testing.T) {
	h := newHub(t)
	r := small(t)
	digest := h.push(t, "me/app", "v1", r)
	want := build(t, "oci:"+r.layout(t).dir(t))
	s := newStore(t)
	var stages []string
	o := Options{Store: s, From: "docker://" + h.host() + "/me/app:v1", Platform: "linux/amd64", Progress: func(stage string, done, total int64) {
		if len(stages) == 0 || stages[len(stages)-1] != stage {
			stages = append(stages, stage)
		}
		if stage == image.StageDownload && (total <= 0 || done > total) {
			t.Errorf("downloaded %d of %d", done, total)
		}
	}}
	img, err := Build(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if img.ID != want.ID || img.Manifest != digest || !slices.Equal(img.Tags, []string{h.host() + "/me/app:v1"}) {
		t.Errorf("got %s %s %v, want %s %s", img.ID, img.Manifest, img.Tags, want.ID, digest)
	}
	if wantStages := []string{image.StageResolve, image.StageDownload, image.StageRead, image.StageWrite, image.StageHash, image.StagePublish}; !slices.Equal(stages, wantStages) {
		t.Errorf("stages %v, want %v", stages, wantStages)
	}

	// The second build fetches only the manifest and the configuration, and builds nothing.
	h.set(nil)
	if again, err := Build(t.Context(), o); err != nil || !again.Cached || h.count("/blobs/") != 1 {
		t.Errorf("again: %+v (%v), %v", again, err, h.asked)
	}
	// Another image with the same layers downloads none of them.
	r.config["Env"] = []string{"OTHER=1"}
	h.push(t, "me/app", "v2", r)
	h.set(nil)
	o.From = "docker://" + h.host() + "/me/app:v2"
	if other, err := Build(t.Context(), o); err != nil || other.Cached || other.ID == img.ID || h.count("/blobs/") != 1 {
		t.Errorf("other: %+v (%v), %v", other, err, h.asked)
	}
	// Build by digest, in the usual notation.
	o.From = "registry:" + h.host() + "/me/app@" + digest
	if byDigest, err := Build(t.Context(), o); err != nil || byDigest.ID != img.ID {
		t.Errorf("by digest: %+v (%v)", byDigest, err)
	}
}

func TestRegistry_layers_that_come_in_another_order_give_the_same_id(t *testing.T) {
	h := newHub(t)
	r := recipe{layers: generate(t, 5, 300, 4), pack: []string{"gzip", "zstd", "", "gzip"}}
	h.push(t, "a", "latest", r)
	want := build(t, "oci:"+r.layout(t).dir(t)).ID
	digests := make([]string, len(r.layers))
	for i, l := range r.layers {
		digests[i] = digestOf(imagetest.Pack(t, r.pack[i], l))
	}
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}} {
		served := make([]chan struct{}, len(order))
		for i := range served {
			served[i] = make(chan struct{})
		}
		h.set(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
			place := slices.IndexFunc(order, func(i int) bool { return strings.HasSuffix(req.URL.Path, digests[i]) })
			if place < 0 {
				next.ServeHTTP(w, req)
				return
			}
			if place > 0 {
				select {
				case <-served[place-1]:
				case <-req.Context().Done():
					return
				}
			}
			next.ServeHTTP(w, req)
			close(served[place])
		})
		img, err := Build(t.Context(), Options{Store: newStore(t), From: "docker://" + h.host() + "/a", Platform: "linux/amd64"})
		if err != nil {
			t.Fatal(err)
		}
		if img.ID != want {
			t.Errorf("in the order %v: id %s, want %s", order, img.ID, want)
		}
	}
}

func TestPruneBlobs_removes_what_no_image_names(t *testing.T) {
	h := newHub(t)
	a := small(t)
	b := small(t)
	b.layers[2] = imagetest.LayerOf(t, imagetest.Reg("other=1"))
	h.push(t, "a", "latest", a)
	h.push(t, "b", "latest", b)
	s := newStore(t)
	for _, repo := range []string{"a", "b"} {
		if _, err := Build(t.Context(), Options{Store: s, From: "docker://" + h.host() + "/" + repo, Platform: "linux/amd64"}); err != nil {
			t.Fatal(err)
		}
	}
	blobs := func() int { return len(imagetest.Must(os.ReadDir(filepath.Join(s.Dir(), "blobs")))) }
	if n := blobs(); n != 4 {
		t.Errorf("%d layers are kept, want the 2 that both have, and 2", n)
	}
	if f, err := oci.PruneBlobs(s); err != nil || len(f.Names) != 0 || blobs() != 4 {
		t.Errorf("with both images: %+v (%v)", f, err)
	}
	if _, err := s.Remove(t.Context(), h.host()+"/b", nil); err != nil {
		t.Fatal(err)
	}
	busy, err := s.Lock(t.Context(), "blobs", osfile.Shared)
	if err != nil {
		t.Fatal(err)
	}
	if f, err := oci.PruneBlobs(s); err != nil || !f.Busy || blobs() != 4 {
		t.Errorf("while a build is under way: %+v (%v)", f, err)
	}
	busy.Close()
	size := int64(len(imagetest.Pack(t, "zstd", b.layers[2])))
	if f, err := oci.PruneBlobs(s); err != nil || len(f.Names) != 1 || f.Bytes != size || blobs() != 3 {
		t.Errorf("without the second: %+v (%v), %d are left", f, err, blobs())
	}
}

func TestRegistry_layer_damaged_in_the_store_is_fetched_again(t *testing.T) {
	h := newHub(t)
	r := small(t)
	h.push(t, "a", "latest", r)
	o := Options{Store: newStore(t), From: "docker://" + h.host() + "/a", Platform: "linux/amd64", NoCache: true}
	first := imagetest.Must(Build(t.Context(), o))
	blob := filepath.Join(o.Store.Dir(), "blobs", strings.Replace(digestOf(r.layers[1]), ":", "-", 1))
	data := imagetest.Must(os.ReadFile(blob))
	data[len(data)/2] ^= 1
	imagetest.Must(0, os.Chmod(blob, 0o600))
	imagetest.Must(0, os.WriteFile(blob, data, 0o600))
	if _, err := Build(t.Context(), o); !errors.Is(err, image.ErrDigest) {
		t.Errorf("with a damaged layer: %v", err)
	}
	if again, err := Build(t.Context(), o); err != nil || again.ID != first.ID {
		t.Errorf("after it: %v", err)
	}
}

func TestRegistry_that_fails(t *testing.T) {
	type answer = func(w http.ResponseWriter, r *http.Request, next http.Handler)
	in := func(part string, a answer) answer {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if strings.Contains(r.URL.Path, part) {
				a(w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		}
	}
	// first spoils only the first n answers.
	first := func(n int, a answer) answer {
		var mu sync.Mutex
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			mu.Lock()
			n--
			spoilt := n >= 0
			mu.Unlock()
			if spoilt {
				a(w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		}
	}
	status := func(code int, header ...string) answer {
		return func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(code)
		}
	}
	// changed passes the right answer through f.
	changed := func(f func(b []byte) []byte) answer {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			rec := httptest.NewRecorder()
			next.ServeHTTP(rec, r)
			for k, v := range rec.Header() {
				if k != "Content-Length" {
					w.Header()[k] = v
				}
			}
			w.WriteHeader(rec.Code)
			_, _ = w.Write(f(rec.Body.Bytes()))
		}
	}
	// cut announces the whole answer and closes the connection in the middle.
	cut := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		w.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
		_, _ = w.Write(rec.Body.Bytes()[:rec.Body.Len()/2])
		// Package http itself repeats a request if the connection closes before the first byte of an answer.
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	flip := func(b []byte) []byte {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
		return b
	}
	r := small(t)
	layer := digestOf(imagetest.Pack(t, "gzip", r.layers[0]))
	var config string
	{
		f := ociFiles{}
		r.manifest(t, f)
		for _, b := range f {
			if bytes.Contains(b, []byte("diff_ids")) {
				config = digestOf(b)
			}
		}
	}
	for name, c := range map[string]struct {
		spoil  answer
		ref    string // instead of the tag
		want   error  // nil: the build succeeds in the end
		pauses int    // at least
		asked  time.Duration
	}{
		"no such repository":                    {ref: "me/other:v1", want: image.ErrNoSource},
		"no such tag":                           {ref: "me/app:v9", want: image.ErrNoSource},
		"no such layer":                         {spoil: in(layer, status(404)), want: image.ErrNoSource},
		"no such configuration":                 {spoil: in(config, status(404)), want: image.ErrNoSource},
		"wants credentials":                     {spoil: status(401, "WWW-Authenticate", `Basic realm="x"`), want: image.ErrAuth},
		"forbids":                               {spoil: in("/manifests/", status(403)), want: image.ErrAuth},
		"limits requests for two seconds":       {spoil: in("/manifests/", first(1, status(429, "Retry-After", "2"))), pauses: 1, asked: 2 * time.Second},
		"limits requests for a layer":           {spoil: in(layer, first(2, status(429, "Retry-After", "3"))), pauses: 2, asked: 3 * time.Second},
		"limits requests and does not say":      {spoil: in("/manifests/", first(2, status(429))), pauses: 2, asked: 2 * time.Second},
		"limits requests for an hour":           {spoil: in("/manifests/", status(429, "Retry-After", "3600")), want: image.ErrRateLimited},
		"limits requests until 2090":            {spoil: in("/manifests/", status(429, "Retry-After", "Sun, 01 Jan 2090 00:00:00 GMT")), want: image.ErrRateLimited},
		"limits requests for ever":              {spoil: in("/manifests/", status(429, "Retry-After", "1")), want: image.ErrRateLimited, pauses: 4 - 1},
		"is unwell for a moment":                {spoil: in(layer, first(1, status(503))), pauses: 1},
		"is unwell":                             {spoil: in(layer, status(500)), want: image.ErrRegistry, pauses: 4 - 1},
		"cuts a connection once":                {spoil: in(layer, first(1, cut)), pauses: 1},
		"cuts connections":                      {spoil: in(layer, cut), want: image.ErrRegistry, pauses: 4 - 1},
		"cuts a manifest":                       {spoil: in("/manifests/", cut), want: image.ErrRegistry},
		"sends another layer once":              {spoil: in(layer, first(1, changed(flip))), pauses: 1},
		"sends another layer":                   {spoil: in(layer, changed(flip)), want: image.ErrDigest},
		"sends a longer layer":                  {spoil: in(layer, changed(func(b []byte) []byte { return append(bytes.Clone(b), 0) })), want: image.ErrDigest},
		"sends a layer without end":             {spoil: in(layer, changed(func([]byte) []byte { return make([]byte, 1<<20) })), want: image.ErrDigest},
		"sends a shorter layer":                 {spoil: in(layer, changed(func(b []byte) []byte { return b[:len(b)-1] })), want: image.ErrRegistry},
		"sends another configuration":           {spoil: in(config, changed(flip)), want: image.ErrDigest},
		"sends another manifest than asked":     {ref: "me/app@DIGEST", spoil: in("/manifests/", changed(flip)), want: image.ErrDigest},
		"has no manifest of that digest":        {ref: "me/app@sha256:" + strings.Repeat("0", 64), want: image.ErrNoSource},
		"sends a manifest of 5 MiB":             {spoil: in("/manifests/", changed(func([]byte) []byte { return make([]byte, 5<<20) })), want: image.ErrBadManifest},
		"sends a web page":                      {spoil: in("/manifests/", func(w http.ResponseWriter, _ *http.Request, _ http.Handler) { fmt.Fprint(w, "<html>") }), want: image.ErrBadManifest},
		"sends to the address of cloud secrets": {spoil: in(layer, status(307, "Location", "http://169.254.169.254/latest")), want: image.ErrRegistry},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			digest := h.push(t, "me/app", "v1", r)
			h.set(c.spoil)
			outside := t.TempDir()
			s := imagetest.Must(image.OpenStore(filepath.Join(outside, "store")))
			ref := c.ref
			if ref == "" {
				ref = "me/app:v1"
			}
			var p noPause
			_, err := Build(t.Context(), Options{Store: s, From: "docker://" + h.host() + "/" + strings.Replace(ref, "DIGEST", digest, 1), Platform: "linux/amd64", pause: p.pause,
				Progress: func(stage string, done, total int64) {
					if stage == image.StageDownload && (done < 0 || done > total) {
						t.Errorf("downloaded %d of %d", done, total)
					}
				}})
			if !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if c.want == image.ErrRateLimited && c.pauses == 0 && len(p.list) > 0 {
				t.Errorf("waited for %v", p.list)
			}
			if len(p.list) < c.pauses || c.asked > 0 && p.list[len(p.list)-1] != c.asked {
				t.Errorf("pauses %v, want %d at least, of %v", p.list, c.pauses, c.asked)
			}
			if c.want != nil {
				nothingLeft(t, s, outside)
			}
			// Every kept layer has its right digest, whatever the registry sent.
			entries, _ := os.ReadDir(filepath.Join(s.Dir(), "blobs"))
			for _, e := range entries {
				if got := digestOf(imagetest.Must(os.ReadFile(filepath.Join(s.Dir(), "blobs", e.Name())))); got != strings.Replace(e.Name(), "-", ":", 1) {
					t.Errorf("layer %s has the digest %s", e.Name(), got)
				}
			}
		})
	}
}

func TestRegistry_credentials_are_those_of_the_docker_config(t *testing.T) {
	h := newHub(t)
	h.push(t, "me/app", "v1", small(t))
	h.set(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if user, pass, ok := r.BasicAuth(); !ok || user != "me" || pass != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
	o := Options{Store: newStore(t), From: "docker://" + h.host() + "/me/app:v1", Platform: "linux/amd64", pause: (&noPause{}).pause}
	if _, err := Build(t.Context(), o); !errors.Is(err, image.ErrAuth) {
		t.Errorf("without credentials: %v", err)
	}
	config := t.TempDir()
	t.Setenv("DOCKER_CONFIG", config)
	for pass, want := range map[string]error{"wrong": image.ErrAuth, "secret": nil} {
		auth := base64.StdEncoding.EncodeToString([]byte("me:" + pass))
		imagetest.Write(t, filepath.Join(config, "config.json"), fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, h.host(), auth))
		if img, err := Build(t.Context(), o); !errors.Is(err, want) || want == nil && (err != nil || len(img.Layers) != 3) {
			t.Errorf("with password %q: %v", pass, err)
		} else if err != nil && strings.Contains(err.Error(), pass) {
			t.Errorf("the password is in the error %q", err)
		}
	}
}

func TestRegistry_token_is_fetched_with_the_credentials(t *testing.T) {
	h := newHub(t)
	h.push(t, "me/app", "v1", small(t))
	config := t.TempDir()
	t.Setenv("DOCKER_CONFIG", config)
	imagetest.Write(t, filepath.Join(config, "config.json"), fmt.Sprintf(`{"auths":{%q:{"username":"me","password":"secret"}}}`, h.host()))
	h.set(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		user, pass, _ := r.BasicAuth()
		switch {
		case r.URL.Path == "/token" && user == "me" && pass == "secret" && r.URL.Query().Get("scope") == "repository:me/app:pull":
			fmt.Fprint(w, `{"token":"for this one"}`)
		case r.URL.Path == "/token":
			w.WriteHeader(http.StatusUnauthorized)
		case r.Header.Get("Authorization") == "Bearer for this one":
			next.ServeHTTP(w, r)
		default:
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="test"`, r.Host))
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	o := Options{Store: newStore(t), From: "docker://" + h.host() + "/me/app:v1", Platform: "linux/amd64", pause: (&noPause{}).pause}
	if _, err := Build(t.Context(), o); err != nil {
		t.Errorf("with the right password: %v", err)
	}
	imagetest.Write(t, filepath.Join(config, "config.json"), fmt.Sprintf(`{"auths":{%q:{"username":"me","password":"other"}}}`, h.host()))
	if _, err := Build(t.Context(), o); !errors.Is(err, image.ErrAuth) {
		t.Errorf("with a wrong password: %v", err)
	}
}

func TestRegistry_build_ends_with_its_context(t *testing.T) {
	h := newHub(t)
	h.push(t, "me/app", "v1", small(t))
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	h.set(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			cancel(cause)
			<-r.Context().Done() // until the client leaves
			return
		}
		next.ServeHTTP(w, r)
	})
	outside := t.TempDir()
	s := imagetest.Must(image.OpenStore(filepath.Join(outside, "store")))
	if _, err := Build(ctx, Options{Store: s, From: "docker://" + h.host() + "/me/app:v1", Platform: "linux/amd64"}); !errors.Is(err, cause) {
		t.Errorf("got %v, want %v", err, cause)
	}
	nothingLeft(t, s, outside)
}
