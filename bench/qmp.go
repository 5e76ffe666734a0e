package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// qmp is a connection to the machine protocol of a QEMU (docs/interop/qmp-spec). It serves one caller at a time.
type qmp struct {
	conn    *net.UnixConn
	version string

	replies chan qmpMessage // closed when the connection ends
	err     error           // the reason, valid once replies is closed
	done    sync.WaitGroup

	mu     sync.Mutex
	events map[string]time.Time // when the first event of each name came
}

// Bounds of QEMU's messages.
const (
	maxQMPLine   = 1 << 20
	maxQMPEvents = 256
)

type qmpMessage struct {
	QMP *struct {
		Version struct {
			QEMU struct{ Major, Minor, Micro int }
		}
	} `json:"QMP"`
	Return json.RawMessage `json:"return"`
	Error  *struct{ Class, Desc string }
	Event  string `json:"event"`
}

var errQMP = errors.New("QEMU's machine protocol")

// newQMP takes over a connection, awaits the greeting and enables commands and events.
func newQMP(ctx context.Context, c *net.UnixConn) (*qmp, error) {
	q := &qmp{conn: c, replies: make(chan qmpMessage, 1), events: map[string]time.Time{}}
	q.done.Go(q.read)
	hello, err := q.reply(ctx)
	if err == nil && hello.QMP == nil {
		err = fmt.Errorf("%w: no greeting", errQMP)
	}
	if err == nil {
		v := hello.QMP.Version.QEMU
		q.version = fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Micro)
		err = q.execute(ctx, "qmp_capabilities", nil, nil)
	}
	if err != nil {
		q.Close()
		return nil, err
	}
	return q, nil
}

// Close ends the connection.
func (q *qmp) Close() {
	q.conn.Close()
	for range q.replies { // until read, which may be sending, has ended
	}
	q.done.Wait()
}

func (q *qmp) read() {
	defer close(q.replies)
	in := bufio.NewScanner(q.conn)
	in.Buffer(nil, maxQMPLine)
	for in.Scan() {
		now := time.Now()
		var m qmpMessage
		if err := json.Unmarshal(in.Bytes(), &m); err != nil {
			q.err = fmt.Errorf("%w: %w", errQMP, err)
			return
		}
		if m.Event == "" {
			q.replies <- m
			continue
		}
		q.mu.Lock()
		if _, known := q.events[m.Event]; !known && len(q.events) < maxQMPEvents {
			q.events[m.Event] = now
		}
		q.mu.Unlock()
	}
	q.err = fmt.Errorf("%w: the connection has ended: %w", errQMP, errors.Join(in.Err(), net.ErrClosed))
}

// event returns when the first event of a name came, or zero.
func (q *qmp) event(name string) time.Time {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.events[name]
}

func (q *qmp) reply(ctx context.Context) (qmpMessage, error) {
	select {
	case m, ok := <-q.replies:
		if !ok {
			return m, q.err
		}
		return m, nil
	case <-ctx.Done():
		return qmpMessage{}, fmt.Errorf("%w: %w", errQMP, ctx.Err())
	}
}

// execute runs a command. out, if not nil, receives the result. SCM_RIGHTS passes the files along.
func (q *qmp) execute(ctx context.Context, command string, args, out any, files ...int) error {
	message := map[string]any{"execute": command}
	if args != nil {
		message["arguments"] = args
	}
	line, err := json.Marshal(message)
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	if _, _, err := q.conn.WriteMsgUnix(append(line, '\n'), rights, nil); err != nil {
		return fmt.Errorf("%w: %s: %w", errQMP, command, err)
	}
	m, err := q.reply(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", command, err)
	case m.Error != nil:
		return fmt.Errorf("%w: %s: %s: %.500q", errQMP, command, m.Error.Class, m.Error.Desc)
	case out != nil:
		if err := json.Unmarshal(m.Return, out); err != nil {
			return fmt.Errorf("%w: %s: %w", errQMP, command, err)
		}
	}
	return nil
}
