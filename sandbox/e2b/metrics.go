package e2b

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/e2b/series"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Sampling. All running sandboxes are measured again and again, whoever asks.
const (
	sampleShare  = 20 // times as long as a round takes is at least between two
	sampleAtOnce = 8
	sampleTime   = 2 * time.Second  // for one guest
	measureTime  = 30 * time.Second // for one that somebody asks for
)

// sample measures the running sandboxes until the server ends. It wakes none.
func (s *Server) sample() {
	for took := time.Duration(0); ; {
		if wait.For(s.life, max(series.Every, sampleShare*took)) != nil {
			return
		}
		begun := time.Now()
		s.sampleAll()
		took = time.Since(begun)
	}
}

func (s *Server) sampleAll() {
	all, _ := s.host.State.List() // what cannot be read is reported elsewhere
	there := map[string]bool{}
	var group errgroup.Group
	group.SetLimit(sampleAtOnce)
	for _, r := range all {
		there[r.ID] = true
		if r.Phase != state.Running {
			continue
		}
		group.Go(func() error {
			if b, err := s.find(r.Spec.Name); err == nil && b.running() == nil && b.record.ID == r.ID {
				ctx, cancel := context.WithTimeout(s.life, sampleTime)
				defer cancel()
				_, _ = s.measure(ctx, b) // a guest that does not answer has a gap
			}
			return nil
		})
	}
	_ = group.Wait() // there is none
	s.history.Retain(there)
}

// measure measures a running sandbox, and does not wake one that sleeps. The use of processors is that since the last
// measurement, or since the boot.
func (s *Server) measure(ctx context.Context, b *box) (series.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, measureTime)
	defer cancel()
	c, err := guest.Dial(ctx, guest.UnixDialer(s.host.State.VsockPath(b.Name())))
	if err != nil {
		return series.Sample{}, err
	}
	defer c.Close()
	g, err := c.Stats(ctx)
	if err != nil {
		return series.Sample{}, err
	}
	now := time.Now().UTC()
	m := series.Sample{Timestamp: now, Unix: now.Unix(), CPUs: g.CPUs, MemTotal: g.Memory.Total, MemCache: g.Memory.Cached + g.Memory.Buffers}
	if g.Memory.Total > g.Memory.Available {
		m.MemUsed = g.Memory.Total - g.Memory.Available
	}
	for _, f := range g.FileSystems {
		if f.Path == "/" {
			m.DiskTotal = f.Size
			if f.Size > f.Free {
				m.DiskUsed = f.Size - f.Free
			}
		}
	}
	used := series.CPU{Busy: g.CPU.User + g.CPU.System + g.CPU.IRQ + g.CPU.Steal, Idle: g.CPU.Idle + g.CPU.IOWait}
	return s.history.Add(b.record.ID, m, used), nil
}

func (s *Server) metricsOf(_ http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	now := time.Now()
	start, end := time.Time{}, now.Add(time.Minute)
	for k, at := range map[string]*time.Time{"start": &start, "end": &end} {
		text := r.URL.Query().Get(k)
		if text == "" {
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, nil, answers.Fail(http.StatusBadRequest, "%s: use seconds since 1970", k)
		}
		*at = time.Unix(n, 0)
	}
	end = end.Add(time.Second - 1) // all of its second
	out := s.history.Between(b.record.ID, start, end)
	if b.paused() || start.After(now) || end.Before(now) || len(out) > 0 && now.Sub(out[len(out)-1].Timestamp) < series.Every {
		return http.StatusOK, out, nil
	}
	m, err := s.measure(r.Context(), b)
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, append(out, m), nil
}

func (s *Server) metricsOfAll(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	ids := strings.Split(r.URL.Query().Get("sandbox_ids"), ",")
	if len(ids) > answers.MaxPage {
		return 0, nil, answers.Fail(http.StatusBadRequest, "sandbox_ids: use at most %d", answers.MaxPage)
	}
	out := map[string]series.Sample{}
	for _, id := range ids {
		b, err := s.findOf(r.Context(), id)
		if err != nil || b.paused() {
			continue
		}
		now := time.Now()
		if all := s.history.Between(b.record.ID, now.Add(-series.Every), now); len(all) > 0 {
			out[id] = all[len(all)-1]
		} else if m, err := s.measure(r.Context(), b); err == nil {
			out[id] = m
		}
	}
	return http.StatusOK, map[string]any{"sandboxes": out}, nil
}

// envdMetrics is the same as the protocol in a sandbox has it.
func envdMetrics(m series.Sample) any {
	return map[string]any{
		"ts": m.Unix, "cpu_count": m.CPUs, "cpu_used_pct": m.CPU, "mem_total": m.MemTotal, "mem_used": m.MemUsed, "mem_cache": m.MemCache,
		"disk_used": m.DiskUsed, "disk_total": m.DiskTotal,
		"mem_total_mib": m.MemTotal >> 20, "mem_used_mib": m.MemUsed >> 20,
	}
}

// logEntry is a line of a sandbox's log.
type logEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Message   string            `json:"message"`
	Line      string            `json:"line"` // the same, for older clients
	Level     string            `json:"level"`
	Fields    map[string]string `json:"fields"`
}

// maxLogs bounds an answer with logs.
const maxLogs = 1000

// logs returns what was done in the sandbox through its agent: its audit trail.
func (s *Server) logs(_ http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	q := r.URL.Query()
	limit := maxLogs
	if text := q.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			return 0, nil, answers.Fail(http.StatusBadRequest, "limit: use 0 to %d", maxLogs)
		}
		limit = min(n, maxLogs)
	}
	var since time.Time
	for _, k := range []string{"cursor", "start"} {
		if text := q.Get(k); text != "" {
			ms, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				return 0, nil, answers.Fail(http.StatusBadRequest, "%s: use milliseconds since 1970", k)
			}
			since = time.UnixMilli(ms)
		}
	}
	backward := q.Get("direction") == "backward"
	out := []logEntry{}
	full := errors.New("enough")
	_, err := s.host.State.Audit(r.Context(), b.Name(), audit.ReadOptions{}, func(e audit.Entry) error {
		before := e.Begin.Before(since)
		if e.Begin.IsZero() || !since.IsZero() && before != backward || limit == 0 {
			return nil
		}
		text := strings.Join(append([]string{string(e.Kind), e.Path, e.Process}, e.Argv...), " ")
		if search := q.Get("search"); search != "" && !strings.Contains(text, search) {
			return nil
		}
		l := logEntry{Timestamp: e.Begin, Message: strings.Join(strings.Fields(text), " "), Level: "info", Fields: map[string]string{"status": string(e.Status)}}
		l.Line = l.Message
		out = append(out, l)
		if len(out) > limit {
			if !backward {
				out = out[:limit]
				return full
			}
			out = out[1:]
		}
		return nil
	})
	if err != nil && !errors.Is(err, full) {
		return 0, nil, err
	}
	return http.StatusOK, map[string]any{"logs": out, "logEntries": out}, nil
}

// running returns an error unless the sandbox runs.
func (b *box) running() error {
	if b.paused() {
		return sandbox.ErrNotRunning
	}
	if !b.meta.Expires.IsZero() && !time.Now().Before(b.meta.Expires) {
		return spec.ErrExpired
	}
	return nil
}
