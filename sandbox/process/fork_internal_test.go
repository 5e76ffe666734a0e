package process

import (
	"context"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/control"
)

func TestA_bad_request_for_a_fork_is_refused(t *testing.T) {
	for _, order := range []string{"", `{"id":""}`, `{"id":"../../x"}`, `{"id":"` + strings.Repeat("G", 32) + `"}`} {
		p := &process{}
		mux := http.NewServeMux()
		mux.HandleFunc("POST "+control.Orders+"fork", p.serveFork)
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
		resp, err := client.Post("http://vm"+control.Orders+"fork", "", strings.NewReader(order))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("order %q: %s", order, resp.Status)
		}
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
	}
}
