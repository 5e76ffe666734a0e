package api

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/fleet"
)

// Bounds of operations.
const (
	maxRunning    = 4   // at once
	maxOperations = 100 // that are remembered
)

// operations are what goes on after its request. They end with the server.
type operations struct {
	mu  sync.Mutex // guards what follows
	all []*operation
}

type operation struct {
	wire.Operation
	by     string
	cancel context.CancelCauseFunc
}

var errCanceled = errors.New("the operation was canceled")

// begin runs do, and returns what is known of it. do returns what it has made in the fields for that.
func (s *Server) begin(r *request, kind string, do func(ctx context.Context, progress func(stage string, done, total int64)) (made wire.Operation, err error)) (wire.Operation, error) {
	o := &operation{by: r.caller().Name}
	o.ID, o.Kind, o.State, o.Begun = rand.Text(), kind, "running", time.Now().UTC()
	ctx := context.WithoutCancel(r.Context())
	ctx, o.cancel = context.WithCancelCause(ctx)
	s.ops.mu.Lock()
	defer s.ops.mu.Unlock()
	running := 0
	for _, is := range s.ops.all {
		if is.State == "running" {
			running++
		}
	}
	if running >= maxRunning {
		o.cancel(nil)
		return wire.Operation{}, own(wire.CodeBusy, "wait until one of GET /v1/operations has ended", "%d operations are under way", running)
	}
	if len(s.ops.all) >= maxOperations {
		i := slices.IndexFunc(s.ops.all, func(is *operation) bool { return is.State != "running" })
		s.ops.all = slices.Delete(s.ops.all, i, i+1)
	}
	s.ops.all = append(s.ops.all, o)
	forget := s.watch(Caller{Local: true}, o.cancel)
	s.streams.Go(func() {
		defer o.cancel(nil)
		defer forget()
		made, err := do(ctx, func(stage string, done, total int64) {
			s.ops.mu.Lock()
			defer s.ops.mu.Unlock()
			o.Stage, o.Done, o.Total = stage, done, total
		})
		s.ops.mu.Lock()
		defer s.ops.mu.Unlock()
		end := time.Now().UTC()
		o.Ended, o.State, o.Image, o.Template = &end, "done", made.Image, made.Template
		if err != nil {
			o.State = "failed"
			if errors.Is(context.Cause(ctx), errCanceled) {
				o.State = "canceled"
			}
			e := ErrorOf(fleet.Fail(kind, "", err))
			o.Error = &e
		}
		s.log.Info("operation over HTTP", "by", o.by, "op", kind, "state", o.State, "error", err)
	})
	return o.Operation, nil
}

// operation returns one of the caller's.
func (s *Server) operation(r *request, do func(*operation)) (wire.Operation, error) {
	s.ops.mu.Lock()
	defer s.ops.mu.Unlock()
	for _, o := range s.ops.all {
		if o.ID == r.PathValue("operation") && (o.by == r.caller().Name || r.caller().Local) {
			do(o)
			return o.Operation, nil
		}
	}
	return wire.Operation{}, own("not-found", "list what there is, with GET /v1/operations", "operation %.64q is not there", r.PathValue("operation"))
}

func operationRoutes() []route {
	const one = "/v1/operations/{operation}"
	return []route{
		{method: http.MethodGet, path: "/v1/operations", scope: ScopeAdmin, op: "list operations", says: "List the caller's operations, the oldest first.", gives: wire.Operations{}, serve: func(s *Server, r *request) (int, any, error) {
			out := wire.Operations{Operations: []wire.Operation{}}
			s.ops.mu.Lock()
			defer s.ops.mu.Unlock()
			for _, o := range s.ops.all {
				if o.by == r.caller().Name || r.caller().Local {
					out.Operations = append(out.Operations, o.Operation)
				}
			}
			return ok(out, nil)
		}},
		{method: http.MethodGet, path: one, scope: ScopeAdmin, op: "get operation", says: "Say how far an operation is.", gives: wire.Operation{}, serve: func(s *Server, r *request) (int, any, error) {
			return ok(s.operation(r, func(*operation) {}))
		}},
		{method: http.MethodDelete, path: one, scope: ScopeAdmin, op: "cancel operation", says: "Cancel an operation. One that has ended stays as it is.", gives: wire.Operation{}, serve: func(s *Server, r *request) (int, any, error) {
			return ok(s.operation(r, func(o *operation) { o.cancel(errCanceled) }))
		}},
	}
}
