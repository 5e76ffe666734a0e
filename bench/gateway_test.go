package bench

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// gatewayEnv has a VM in memory whose server answers with a text.
func gatewayEnv(t *testing.T, text string) Env {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) }))
	t.Cleanup(s.Close)
	vms := &sandboxtest.VMs{
		Commands: map[string]fakeguest.Command{"python3": func(ctx context.Context, p *fakeguest.Process) int {
			if p.Guest.WriteFile(busyFile, nil) != nil {
				return 1
			}
			<-ctx.Done()
			return 0
		}},
		Dial: func(ctx context.Context, _, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, s.Listener.Addr().String())
		},
	}
	e := Env{Store: vms.Host(t), Image: sandboxtest.Image}
	var err error
	if e.Launcher, err = vms.Launcher(e.Store); err != nil {
		t.Fatal(err)
	}
	return e
}

func TestGateway_gives_a_row_for_each_way_state_and_connection_and_what_it_adds(t *testing.T) {
	rows, err := Gateway(t.Context(), gatewayEnv(t, "ok"), Options{N: 2, Warmup: 1, MemoryMiB: []int{64}, Depth: 1})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rows {
		got = append(got, fmt.Sprint(r.Name, " ", r.Params["by"], " ", r.Params["state"], " ", r.Params["connection"]))
		if r.N != 2 || r.P50 < 0 || r.Name == "gateway" && (r.P50 == 0 || (len(r.Stages) == 3) != (r.Params["by"] != byDirect)) {
			t.Errorf("%s: %d runs, %v ms, stages %v", got[len(got)-1], r.N, r.P50, r.Stages)
		}
	}
	var want []string
	for _, row := range []string{"gateway", "gateway_added"} {
		for _, by := range []string{byDirect, byHTTP, byHTTPS} {
			switch {
			case by != byDirect:
				for _, c := range []string{"asleep new", "asleep kept", "awake first", "awake new", "awake kept"} {
					want = append(want, row+" "+by+" "+c)
				}
			case row == "gateway":
				want = append(want, "gateway direct asleep new", "gateway direct awake new", "gateway direct awake kept")
			}
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("rows\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestGateway_other_answer_gives_error_and_its_sandbox_is_removed(t *testing.T) {
	e := gatewayEnv(t, "ko")
	rows, err := Gateway(t.Context(), e, Options{N: 1, MemoryMiB: []int{64}})
	if err == nil || rows != nil || !strings.Contains(err.Error(), `it answers 200 OK "ko"`) {
		t.Errorf("got %v, %v", rows, err)
	}
	if _, err := e.Store.State.Get(vmName()); err == nil {
		t.Error("its sandbox is still there")
	}
}
