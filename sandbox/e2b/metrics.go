package e2b

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// metric is what a sandbox uses, as its guest counts it. Sizes are in bytes.
type metric struct {
	Timestamp time.Time `json:"timestamp"`
	Unix      int64     `json:"timestampUnix"`
	CPUs      int       `json:"cpuCount"`
	CPU       float64   `json:"cpuUsedPct"`
	MemUsed   uint64    `json:"memUsed"`
	MemTotal  uint64    `json:"memTotal"`
	MemCache  uint64    `json:"memCache"`
	DiskUsed  uint64    `json:"diskUsed"`
	DiskTotal uint64    `json:"diskTotal"`
}

// cpuSample is the processor time of a guest at a moment, in milliseconds of all its CPUs.
type cpuSample struct {
	at         time.Time
	busy, idle float64
}

// maxSamples bounds the guests whose last sample is remembered.
const maxSamples = 4096

// measure measures a running sandbox. The use of processors is that since the last measurement, or since the boot.
func (s *Server) measure(ctx context.Context, b *box) (*metric, error) {
	st, err := b.Stats(ctx)
	if err != nil {
		return nil, err
	}
	if st.Guest == nil {
		return nil, fmt.Errorf("%w: %s", guest.ErrUnavailable, st.Problem)
	}
	g := st.Guest
	m := &metric{Timestamp: st.Time, Unix: st.Time.Unix(), CPUs: g.CPUs, MemTotal: g.Memory.Total, MemCache: g.Memory.Cached + g.Memory.Buffers}
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
	now := cpuSample{st.Time, g.CPU.User + g.CPU.System + g.CPU.IRQ + g.CPU.Steal, g.CPU.Idle + g.CPU.IOWait}
	s.mu.Lock()
	last := s.usage[b.record.ID]
	if len(s.usage) >= maxSamples {
		clear(s.usage)
	}
	s.usage[b.record.ID] = now
	s.mu.Unlock()
	busy, idle := now.busy-last.busy, now.idle-last.idle
	if busy < 0 || idle < 0 { // it has booted since
		busy, idle = now.busy, now.idle
	}
	if all := busy + idle; all > 0 {
		m.CPU = float64(int(busy/all*100*100*float64(max(g.CPUs, 1)))) / 100
	}
	return m, nil
}

func (s *Server) metricsOf(_ http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	out := []*metric{}
	for _, k := range []string{"start", "end"} {
		text := r.URL.Query().Get(k)
		if text == "" {
			continue
		}
		at, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, nil, fail(http.StatusBadRequest, "%s: use seconds since 1970", k)
		}
		now := time.Now().Unix()
		if k == "start" && now < at || k == "end" && now > at+1 {
			return http.StatusOK, out, nil // what was is not kept
		}
	}
	if b.paused() {
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
	if len(ids) > maxPage {
		return 0, nil, fail(http.StatusBadRequest, "sandbox_ids: use at most %d", maxPage)
	}
	out := map[string]*metric{}
	for _, id := range ids {
		b, err := s.findOf(r.Context(), id)
		if err == nil && !b.paused() {
			if m, err := s.measure(r.Context(), b); err == nil {
				out[id] = m
			}
		}
	}
	return http.StatusOK, map[string]any{"sandboxes": out}, nil
}

// envdMetrics is the same as the protocol in a sandbox has it.
func envdMetrics(m *metric) any {
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
			return 0, nil, fail(http.StatusBadRequest, "limit: use 0 to %d", maxLogs)
		}
		limit = min(n, maxLogs)
	}
	var since time.Time
	for _, k := range []string{"cursor", "start"} {
		if text := q.Get(k); text != "" {
			ms, err := strconv.ParseInt(text, 10, 64)
			if err != nil {
				return 0, nil, fail(http.StatusBadRequest, "%s: use milliseconds since 1970", k)
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
