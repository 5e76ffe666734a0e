package process

import (
	"context"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

func TestABadRequestForAForkIsRefused(t *testing.T) {
	for _, id := range []string{"", "../../x", strings.Repeat("G", 32)} {
		p := &process{}
		mux := http.NewServeMux()
		mux.HandleFunc("POST /fork", p.serveFork)
		path := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Handler: mux}
		go func() { _ = srv.Serve(l) }()
		client := &http.Client{Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "unix", path)
			},
			DisableKeepAlives: true,
		}}
		resp, err := client.Post("http://vm/fork?id="+id, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("id %q: %s", id, resp.Status)
		}
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
	}
}
