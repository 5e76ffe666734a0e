package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// PortName is the name of the virtio-serial port that carries the frames (virtio 1.2, section 5.3).
const PortName = "drowse.hwkvm"

// MaxPayload bounds the payload of one frame, in bytes. It bounds what a reader allocates.
const MaxPayload = 64 << 10

// StdinWindow is how many bytes of standard input may be on their way without an acknowledgement. It keeps a
// command that never reads its input from blocking the signals behind it.
const StdinWindow = 4 * MaxPayload

const headerSize = 5

// Type says what the payload of a frame is.
type Type byte

// The frames. Request, Stdin, StdinEOF, Signal and Nudge go to the machine, the others to the host.
const (
	Request  Type = 1  // JSON of Command, in as many frames as it takes, ended by an empty one
	Stdin    Type = 2  // bytes for the command's standard input
	StdinEOF Type = 3  // no payload: the standard input ends here
	Signal   Type = 4  // uint32: the number of a signal for the command
	Nudge    Type = 5  // no payload, no meaning: it comes with an interrupt; after Started, once in NudgeInterval
	Started  Type = 16 // no payload: the command runs
	Stdout   Type = 17 // bytes of the command's standard output
	Stderr   Type = 18 // bytes of the command's standard error
	StdinAck Type = 19 // uint32: bytes of standard input consumed
	Exit     Type = 20 // JSON of Result: the last frame
	Alive    Type = 21 // no payload: the machine still runs; after Started, once in AliveInterval
)

// AliveInterval is how often the machine says that it still runs.
const AliveInterval = 5 * time.Second

// NudgeInterval is how often the host interrupts the machine, and so how long one at most stands still whose timer's
// interrupt QEMU has lost: see "What does not work there" in package hwkvm.
const NudgeInterval = time.Second

// ResultTaken is how long the machine waits, after Exit, for the host to take what was sent and to end it.
const ResultTaken = 10 * time.Minute

// ErrFrame says that the peer broke the framing: the stream cannot be read any further.
var ErrFrame = errors.New("malformed frame")

// MaxRequest bounds the JSON form of a Command, in bytes.
const MaxRequest = 8 << 20

// Command is what the machine shall run.
type Command struct {
	Args []string `json:"args"`
	Env  []string `json:"env"`
	Dir  string   `json:"dir"`
	// Time is the wall-clock time of the host in nanoseconds since 1970.
	Time int64 `json:"time"`
}

// Result is how it ended. Exactly one of the first three tells: Error is not empty, Signal is not 0, or the command
// exited with Code.
type Result struct {
	Code   int    `json:"code"`
	Signal int    `json:"signal,omitempty"`
	Error  string `json:"error,omitempty"`
	// NotFound and NotExecutable refine Error for a command that could not be started.
	NotFound      bool `json:"not_found,omitempty"`
	NotExecutable bool `json:"not_executable,omitempty"`
}

// Exit statuses of a runner, as shells and timeout(1) have them.
const (
	StatusTimeout       = 124 // the time limit was reached
	StatusRunner        = 125 // the runner itself failed
	StatusNotExecutable = 126 // the command is there and cannot be executed
	StatusNotFound      = 127 // the command is not there
	StatusSignal        = 128 // plus the number of the signal that ended the command
)

// Status encodes r as the exit status of a process.
func (r Result) Status() int {
	switch {
	case r.NotFound:
		return StatusNotFound
	case r.NotExecutable:
		return StatusNotExecutable
	case r.Error != "":
		return StatusRunner
	case r.Signal != 0:
		return StatusSignal + r.Signal
	default:
		return r.Code
	}
}

// A Writer sends frames. It is safe for concurrent use: each frame is written whole.
type Writer struct {
	mu  sync.Mutex // guards w and buf
	w   io.Writer
	buf []byte
}

// NewWriter returns a Writer on w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Send writes one frame. A payload over MaxPayload is refused.
func (w *Writer) Send(t Type, payload []byte) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("frame type %d of %d bytes: %w", t, len(payload), ErrFrame)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = append(w.buf[:0], byte(t), 0, 0, 0, 0)
	binary.LittleEndian.PutUint32(w.buf[1:], uint32(len(payload)))
	w.buf = append(w.buf, payload...)
	if _, err := w.w.Write(w.buf); err != nil {
		return fmt.Errorf("send frame type %d: %w", t, err)
	}
	return nil
}

// SendUint32 writes a frame whose payload is one number.
func (w *Writer) SendUint32(t Type, v uint32) error {
	return w.Send(t, binary.LittleEndian.AppendUint32(nil, v))
}

// SendJSON writes one frame with the JSON form of v.
func (w *Writer) SendJSON(t Type, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode frame type %d: %w", t, err)
	}
	return w.Send(t, b)
}

// SendCommand writes the Request frames for c.
func (w *Writer) SendCommand(c Command) error {
	b, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("encode the command: %w", err)
	}
	if len(b) > MaxRequest {
		return fmt.Errorf("arguments and environment take %d bytes, over the limit of %d: %w", len(b), MaxRequest, ErrFrame)
	}
	for len(b) > 0 {
		n := min(len(b), MaxPayload)
		if err := w.Send(Request, b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return w.Send(Request, nil)
}

// A Reader receives frames. It is for one goroutine.
type Reader struct {
	r   io.Reader
	buf [MaxPayload]byte
}

// NewReader returns a Reader on r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next returns the next frame. The payload is valid until the next call. At the end of the stream between two
// frames the error is io.EOF, inside a frame io.ErrUnexpectedEOF.
func (r *Reader) Next() (Type, []byte, error) {
	var h [headerSize]byte
	if _, err := io.ReadFull(r.r, h[:]); err != nil {
		return 0, nil, err
	}
	n := binary.LittleEndian.Uint32(h[1:])
	if n > MaxPayload {
		return 0, nil, fmt.Errorf("frame type %d announces %d bytes: %w", h[0], n, ErrFrame)
	}
	if _, err := io.ReadFull(r.r, r.buf[:n]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return Type(h[0]), r.buf[:n], nil
}

// Command reads the Request frames.
func (r *Reader) Command() (Command, error) {
	var b []byte
	for {
		t, p, err := r.Next()
		if err != nil {
			return Command{}, fmt.Errorf("read the command: %w", err)
		}
		if t != Request || len(b)+len(p) > MaxRequest {
			return Command{}, fmt.Errorf("read the command: frame type %d after %d bytes: %w", t, len(b), ErrFrame)
		}
		if len(p) == 0 {
			break
		}
		b = append(b, p...)
	}
	var c Command
	if err := json.Unmarshal(b, &c); err != nil {
		return Command{}, fmt.Errorf("decode the command: %w", err)
	}
	return c, nil
}

// Uint32 decodes the payload of a frame that carries one number.
func Uint32(p []byte) (uint32, error) {
	if len(p) != 4 {
		return 0, fmt.Errorf("number of %d bytes: %w", len(p), ErrFrame)
	}
	return binary.LittleEndian.Uint32(p), nil
}
