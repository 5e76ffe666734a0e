package builder

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

func TestRegistry_answers_behind_redirects_have_their_bounds(t *testing.T) {
	for name, c := range map[string]struct {
		part string // of the path that is redirected
		body func(real []byte) []byte
		want error
	}{
		"the right manifest":    {part: "/manifests/"},
		"a manifest of 5 MiB":   {part: "/manifests/", body: func([]byte) []byte { return make([]byte, 5<<20) }, want: image.ErrBadManifest},
		"another manifest":      {part: "/manifests/", body: func(b []byte) []byte { return bytes.Replace(b, []byte("{"), []byte("{ "), 1) }, want: image.ErrDigest},
		"the right layer":       {part: "/blobs/"},
		"a layer without end":   {part: "/blobs/", body: func([]byte) []byte { return make([]byte, 1<<20) }, want: image.ErrDigest},
		"a greeting of 5 MiB":   {part: "/v2/", body: func([]byte) []byte { return make([]byte, 5<<20) }, want: image.ErrBadManifest},
		"the right answers all": {part: "/v2/"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			digest := h.push(t, "me/app", "v1", small(t))
			h.set(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				if real, ok := strings.CutPrefix(r.URL.Path, "/elsewhere"); ok {
					r.URL.Path = real
					rec := httptest.NewRecorder()
					next.ServeHTTP(rec, r)
					body := rec.Body.Bytes()
					if c.body != nil {
						body = c.body(body)
					}
					w.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
					_, _ = w.Write(body)
					return
				}
				if strings.Contains(r.URL.Path, c.part) {
					http.Redirect(w, r, "/elsewhere"+r.URL.Path, http.StatusTemporaryRedirect)
					return
				}
				next.ServeHTTP(w, r)
			})
			_, err := Build(t.Context(), Options{Store: newStore(t), From: "docker://" + h.host() + "/me/app@" + digest, Platform: "linux/amd64", pause: (&noPause{}).pause})
			if !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
}

func TestRegistry_credentials_stay_with_their_host(t *testing.T) {
	for _, scheme := range []string{"Basic", "Bearer"} {
		t.Run(scheme, func(t *testing.T) {
			h := newHub(t)
			h.push(t, "me/app", "v1", small(t))
			config := t.TempDir()
			t.Setenv("DOCKER_CONFIG", config)
			imagetest.Write(t, filepath.Join(config, "config.json"), fmt.Sprintf(`{"auths":{%q:{"username":"me","password":"secret"}}}`, h.host()))
			var mu sync.Mutex
			asked := 0
			// other is another registry. It wants credentials itself and then returns what the client asks for.
			other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				asked++
				mu.Unlock()
				if a := r.Header.Get("Authorization"); a != "" && a != "Bearer for anybody" {
					t.Errorf("%s: it was given %q", r.URL.Path, a)
				}
				if r.URL.Path == "/token" {
					fmt.Fprint(w, `{"token":"for anybody"}`)
					return
				}
				if r.Header.Get("Authorization") == "" && scheme == "Bearer" {
					w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="other"`, r.Host))
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				h.Config.Handler.ServeHTTP(w, imagetest.Must(http.NewRequestWithContext(r.Context(), r.Method, "/plain"+r.URL.Path, nil)))
			}))
			t.Cleanup(other.Close)
			h.set(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				if real, ok := strings.CutPrefix(r.URL.Path, "/plain"); ok {
					r.URL.Path = real
					next.ServeHTTP(w, r)
					return
				}
				user, pass, _ := r.BasicAuth()
				known := user == "me" && pass == "secret"
				switch {
				case r.URL.Path == "/token" && known:
					fmt.Fprint(w, `{"token":"for this one"}`)
				case scheme == "Basic" && !known:
					w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
					w.WriteHeader(http.StatusUnauthorized)
				case scheme == "Bearer" && r.Header.Get("Authorization") != "Bearer for this one":
					w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="test"`, r.Host))
					w.WriteHeader(http.StatusUnauthorized)
				case strings.Contains(r.URL.Path, "/blobs/"):
					http.Redirect(w, r, other.URL+r.URL.Path, http.StatusTemporaryRedirect)
				default:
					next.ServeHTTP(w, r)
				}
			})
			if _, err := Build(t.Context(), Options{Store: newStore(t), From: "docker://" + h.host() + "/me/app:v1", Platform: "linux/amd64", pause: (&noPause{}).pause}); err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if asked < 3 {
				t.Errorf("the other host was asked %d times only", asked)
			}
		})
	}
}

func TestRegistry_wrong_diff_id_is_not_called_damage_of_the_store(t *testing.T) {
	h := newHub(t)
	r := small(t)
	r.editConfig = func(d doc) { d["rootfs"].(doc)["diff_ids"].([]string)[1] = "sha256:" + strings.Repeat("0", 64) }
	h.push(t, "a", "latest", r)
	s := newStore(t)
	_, err := Build(t.Context(), Options{Store: s, From: "docker://" + h.host() + "/a", Platform: "linux/amd64"})
	if !errors.Is(err, image.ErrDigest) || strings.Contains(err.Error(), "image store") {
		t.Errorf("got %v", err)
	}
	if n := len(imagetest.Must(os.ReadDir(filepath.Join(s.Dir(), "blobs")))); n != len(r.layers) {
		t.Errorf("%d layers are kept, want %d", n, len(r.layers))
	}
}
