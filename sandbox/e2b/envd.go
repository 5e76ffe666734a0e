package e2b

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/e2b/bodies"
	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/filesystem"
	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/process"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// envdRoutes sets up the protocol in a sandbox.
func (s *Server) envdRoutes() {
	o := []connect.HandlerOption{
		connect.WithReadMaxBytes(maxMessage), connect.WithSendMaxBytes(maxAnswer), connect.WithCompressMinBytes(4 << 10),
		connect.WithInterceptors(s.translating()), connect.WithRecover(func(_ context.Context, p connect.Spec, _ http.Header, v any) error {
			s.report(p.Procedure, "", fmt.Errorf("panic: %v", v))
			return connect.NewError(connect.CodeInternal, errors.New("the server has failed"))
		}),
	}
	s.envd.Handle(process.NewProcessHandler(processes{s}, o...))
	s.envd.Handle(filesystem.NewFilesystemHandler(files{s}, o...))
	s.envd.HandleFunc("GET /files", s.download)
	s.envd.HandleFunc("POST /files", s.upload)
	s.envd.HandleFunc("POST /files/compose", s.compose)
	s.envd.HandleFunc("GET /metrics", s.envdMetrics)
	s.envd.HandleFunc("GET /envs", s.envs)
}

// Bounds of messages of the protocol. Clients send inputs and uploads of processes in pieces.
const (
	maxMessage = 2 << 20
	maxAnswer  = 64 << 20 // a list of a large directory
)

type contextKey int

const (
	keyBox contextKey = iota
	keyUser
	keyToken // of the control plane: the key
)

// boxOf returns the sandbox of a request that was let in.
func boxOf(ctx context.Context) *box { return ctx.Value(keyBox).(*box) }

// userOf returns the name of the user whom the request chooses; "" is the default user.
func userOf(ctx context.Context) string {
	name, _ := ctx.Value(keyUser).(string)
	return name
}

// serveSandbox serves a request to a port of a sandbox.
func (s *Server) serveSandbox(w http.ResponseWriter, r *http.Request, to gateway.Route) {
	if s.o.Peers != nil {
		leave, ok := s.enter(to.Sandbox, maxOfOne)
		answered, away := false, error(nil)
		if ok {
			answered, away = s.passOn(w, r, to.Sandbox, tokens.Token{})
			leave()
		}
		if answered {
			return
		}
		if away != nil {
			unread(w, r)
			asAPI(away, to.Sandbox).Write(w)
			return
		}
	}
	if to.Port != envdPort {
		s.gate.ServeHTTP(w, r)
		return
	}
	leave, ok := s.enter(to.Sandbox, maxOfOne)
	if !ok {
		tooMany(w, r)
		return
	}
	defer leave()
	s.serveEnvd(w, r, to.Sandbox)
}

func tooMany(w http.ResponseWriter, r *http.Request) {
	unread(w, r)
	w.Header().Set("Retry-After", "1")
	envdError(w, r, http.StatusTooManyRequests, connect.CodeResourceExhausted, "too many requests to the sandbox, or to those of its owner, are under way")
}

// enter counts a request to a sandbox, or one of a kind, until leave.
func (s *Server) enter(id string, limit int) (leave func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.requests >= maxRequests || s.of[id] >= limit {
		return nil, false
	}
	s.requests++
	s.of[id]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.requests--
		if s.of[id]--; s.of[id] == 0 {
			delete(s.of, id)
		}
	}, true
}

// serveEnvd serves the protocol in a sandbox.
func (s *Server) serveEnvd(w http.ResponseWriter, r *http.Request, id string) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Expose-Headers", "*")
	if r.Method == http.MethodOptions {
		h.Set("Access-Control-Allow-Methods", "GET, POST, HEAD, OPTIONS")
		h.Set("Access-Control-Allow-Headers", "*, Authorization")
		h.Set("Access-Control-Max-Age", "7200")
		w.WriteHeader(http.StatusNoContent)
		return
	}
	b, err := s.find(id)
	if err != nil {
		unread(w, r)
		if !errors.Is(err, sandbox.ErrNotFound) {
			s.report("find", id, err)
		}
		notRunning(w, id)
		return
	}
	if r.URL.Path == "/health" && r.Method == http.MethodGet {
		if b.running() != nil {
			notRunning(w, id)
			return
		}
		w.WriteHeader(http.StatusNoContent)
		return
	}
	want, err := token(s.host.State, b.record, useEnvd)
	if err != nil {
		unread(w, r)
		s.report("token", id, err)
		envdError(w, r, http.StatusInternalServerError, connect.CodeInternal, "the host has failed")
		return
	}
	shown := r.Header.Values(headerEnvd)
	ok := len(shown) == 1 && same(shown[0], want)
	withToken := ok
	if !ok && len(shown) == 0 && r.URL.Path == "/files" {
		operation := map[string]string{http.MethodGet: "read", http.MethodHead: "read", http.MethodPost: "write"}[r.Method]
		ok = operation != "" && signed(r, operation, want, time.Now())
	}
	if !ok {
		unread(w, r)
		message := "the access token or the signature is missing or wrong"
		if expired(r, time.Now()) {
			message = "signature is already expired"
		}
		envdError(w, r, http.StatusUnauthorized, connect.CodeUnauthenticated, message)
		return
	}
	leave, ok := s.inside.take(b.meta.Owner)
	if !ok {
		tooMany(w, r)
		return
	}
	defer leave()
	if b.running() != nil {
		if !b.meta.E2B.Resume || !b.paused() {
			unread(w, r)
			notRunning(w, id)
			return
		}
		if err := s.resume(r.Context(), b, time.Duration(b.meta.E2B.Timeout)*time.Second, false); err != nil {
			unread(w, r)
			if e := asAPI(err, id); e.Code == http.StatusTooManyRequests {
				e.Write(w)
				return
			}
			s.report("resume", id, err)
			notRunning(w, id)
			return
		}
		if b, err = s.find(id); err != nil {
			notRunning(w, id)
			return
		}
	}
	ctx := context.WithValue(r.Context(), keyBox, b)
	user := r.URL.Query().Get("username")
	// A signature is for one user, also if it is the default one.
	if name, ok := basicUser(r.Header.Get("Authorization")); ok && user == "" && withToken {
		user = name
	}
	if kind := r.Header.Get("Content-Type"); !strings.HasPrefix(r.URL.Path, "/files") && !strings.HasPrefix(kind, "application/connect+") && !strings.HasPrefix(kind, "application/grpc") {
		r.Body = struct {
			io.Reader
			io.Closer
		}{bodies.Reader{Reader: r.Body, S: bodies.Stalling{ResponseController: http.NewResponseController(w)}}, r.Body}
	}
	s.envd.ServeHTTP(w, r.WithContext(context.WithValue(ctx, keyUser, user)))
}

// notRunning answers for a sandbox that does not run.
func notRunning(w http.ResponseWriter, id string) {
	answers.WriteJSON(w, http.StatusBadGateway, map[string]any{"sandboxId": id, "message": notThere, "code": http.StatusBadGateway})
}

// basicUser returns the user of HTTP's Basic authentication, which has no password here: it only says as whom to do
// something in the guest.
func basicUser(header string) (string, bool) {
	kind, text, _ := strings.Cut(header, " ")
	if !strings.EqualFold(kind, "Basic") {
		return "", false
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return "", false
	}
	name, _, _ := strings.Cut(string(data), ":")
	return name, true
}

// envdError answers with an error before a call begins: Connect's words, or for a plain request its status.
func envdError(w http.ResponseWriter, r *http.Request, status int, code connect.Code, message string) {
	var is any = status
	if strings.HasPrefix(r.URL.Path, "/"+process.ProcessName+"/") || strings.HasPrefix(r.URL.Path, "/"+filesystem.FilesystemName+"/") {
		is = code.String()
	}
	answers.WriteJSON(w, status, map[string]any{"code": is, "message": message})
}

// agent connects to the agent of the sandbox of a request.
func (s *Server) agent(ctx context.Context) (*guest.Client, error) { return boxOf(ctx).Agent(ctx) }

// gone reports whether an error says that the sandbox does not run.
func gone(err error) bool {
	for _, target := range []error{sandbox.ErrNotRunning, guest.ErrConnectionLost, guest.ErrUnavailable, spec.ErrExpired, sandbox.ErrNotFound} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// asConnect gives an error the code of the protocol. The texts of guests' agents pass: they are made printable.
func (s *Server) asConnect(ctx context.Context, what string, err error) error {
	var have *connect.Error
	if err == nil || errors.As(err, &have) {
		return err
	}
	code := connect.CodeInternal
	is := func(target error) bool { return errors.Is(err, target) }
	switch {
	case is(context.DeadlineExceeded):
		code, err = connect.CodeDeadlineExceeded, errors.New("the deadline has passed")
	case is(context.Canceled):
		code, err = connect.CodeCanceled, errors.New("the request was canceled")
	case gone(err):
		code, err = connect.CodeUnavailable, errors.New("the sandbox was paused or removed")
	case is(fs.ErrNotExist), is(guest.ErrNotFound):
		code = connect.CodeNotFound
	case is(fs.ErrExist):
		code = connect.CodeAlreadyExists
	case is(fs.ErrPermission):
		code = connect.CodePermissionDenied
	case is(guest.ErrInvalid):
		code = connect.CodeInvalidArgument
	case is(guest.ErrFull), is(guest.ErrLimit):
		code = connect.CodeResourceExhausted
	case is(guest.ErrNotRunning):
		code = connect.CodeNotFound
	case is(guest.ErrRemote):
		code = connect.CodeFailedPrecondition
	default:
		s.report(what, boxOf(ctx).Name(), err)
		err = errors.New("the host has failed: its log says why")
	}
	return connect.NewError(code, err)
}

// translating gives errors of all calls their codes.
func (s *Server) translating() connect.Interceptor { return translator{s} }

type translator struct{ s *Server }

func (t translator) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		out, err := next(ctx, r)
		return out, t.s.asConnect(ctx, r.Spec().Procedure, err)
	}
}

func (t translator) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (t translator) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, c connect.StreamingHandlerConn) error {
		return t.s.asConnect(ctx, c.Spec().Procedure, next(ctx, c))
	}
}

func (s *Server) envdMetrics(w http.ResponseWriter, r *http.Request) {
	m, err := s.measure(r.Context(), boxOf(r.Context()))
	if err != nil {
		s.answerFile(w, r, err)
		return
	}
	answers.WriteJSON(w, http.StatusOK, envdMetrics(m))
}

func (s *Server) envs(w http.ResponseWriter, r *http.Request) {
	out := boxOf(r.Context()).meta.E2B.EnvVars
	if out == nil {
		out = map[string]string{}
	}
	answers.WriteJSON(w, http.StatusOK, out)
}
