package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// errForkGivenUp is the cause when the caller of a fork has left or aborted it.
var errForkGivenUp = errors.New("whoever wanted the fork has given it up")

// serveFork answers a control.ForkOrder. The request becomes a plain connection, because serveFork sends a file
// descriptor over it.
func (p *process) serveFork(w http.ResponseWriter, req *http.Request) {
	var o control.ForkOrder
	if err := json.NewDecoder(io.LimitReader(req.Body, control.MaxOrder)).Decode(&o); err != nil || !state.IDPattern.MatchString(o.ID) {
		http.Error(w, "no order of a fork", http.StatusBadRequest)
		return
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Time{})
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		_, _ = io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
		return
	}
	if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"); err != nil {
		return
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	var delivered atomic.Bool
	go func() {
		// A caller that leaves before the image is delivered cancels the fork. Later its children may need the
		// snapshot, unless it aborts.
		text, err := rw.ReadString('\n')
		if text == control.ForkAbort || err != nil && !delivered.Load() {
			cancel(errForkGivenUp)
		}
	}()
	res, err := p.fork(ctx, o.ID, o.Note, func(image *os.File, l control.ForkLine) error {
		delivered.Store(true)
		return control.SendLine(uc, l, image)
	})
	l := control.ForkLine{Result: &res}
	if err != nil {
		l = control.ForkLine{Error: control.ReportError(err)}
	}
	if err := control.SendLine(uc, l, nil); err != nil {
		p.log.Info("nobody has waited for the end of a fork", "error", err)
	}
}

// fork makes an image for children and lets the VM run on. Then it writes the snapshot that they come back from.
func (p *process) fork(ctx context.Context, id, note string, deliver func(*os.File, control.ForkLine) error) (spec.SleepResult, error) {
	if err := p.whole(ctx); err != nil {
		return spec.SleepResult{}, err
	}
	end, err := p.begin()
	if err != nil {
		return spec.SleepResult{}, err
	}
	defer end()
	defer p.shortenDisk()
	// Children start between these hooks and their counterparts.
	hooks, err := p.in.RunHooksBefore(ctx, guest.HookSnapshot, "")
	if err != nil {
		return spec.SleepResult{}, fmt.Errorf("forking: %w: %s runs on", err, p.r.Spec.Name)
	}
	res, err := p.captureLive(ctx, hooks, state.KindFork, note, func(o *instance.CaptureOptions) {
		o.ID, o.Dir = id, p.store.SnapshotDir(id)
		o.Fork = func(image *os.File, c *instance.Capture) error {
			return deliver(image, control.ForkLine{
				Layers: o.Names(c.Disk), Pages: c.Shareable,
				Stages: map[string]float64{"ahead": control.Milliseconds(c.Ahead), "pause": control.Milliseconds(c.Pause), "fill": control.Milliseconds(c.Fill)},
			})
		}
	})
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = errors.Join(cause, err)
		}
		return res, fmt.Errorf("taking the snapshot of a fork: %w: %s runs on", err, p.r.Spec.Name)
	}
	// The next snapshot builds on this one, even if no child is left.
	p.r.Base = id
	if err := p.store.Save(p.r); err != nil {
		p.log.Warn("the next snapshot may have all of RAM", "error", err)
	}
	return res, nil
}
