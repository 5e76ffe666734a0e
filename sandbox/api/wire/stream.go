package wire

import "encoding/json"

// A stream of exec or attach is a WebSocket (RFC 6455) without compression. A binary message is data: its first byte is
// the number of a stream, the rest is what was written there. A text message is a Control. docs/reference/http-api.md
// describes both for clients.

// HeaderHere has a server do what is asked itself, or refuse it, and not pass it on to another host of its cluster. A
// list has its own sandboxes then.
const HeaderHere = "Drowse-Here"

// Subprotocols of WebSockets. A client offers StreamProtocol. One that cannot set a header, such as a page, also
// offers its token after BearerProtocol.
const (
	StreamProtocol = "drowse.v1"
	BearerProtocol = "drowse.bearer."
)

// Numbers of streams.
const (
	StreamStdin  byte = 0
	StreamStdout byte = 1
	StreamStderr byte = 2
)

// Bounds of streams, in bytes.
const (
	// MaxMessage bounds a message of a client, MaxChunk the data in a message of the server.
	MaxMessage = 1 << 20
	MaxChunk   = 32 << 10
	// StdinWindow is how much of stdin may be sent beyond what was acknowledged. The server reads no further until
	// the command has read some of it, and then does not see signals either.
	StdinWindow = 256 << 10
	// MinWindow is the least Control.Window.
	MinWindow = MaxChunk
)

// Types of Control. The client sends the first six.
const (
	ControlStart  = "start"  // the first message of an exec: an ExecStart
	ControlResize = "resize" // Rows, Cols
	ControlSignal = "signal" // Signal
	ControlEOF    = "eof"    // the end of stdin, or of one direction of a connection; of a connection both ends send it
	ControlAck    = "ack"    // Bytes: how many of output were consumed since the start; the server's are of stdin
	ControlDetach = "detach" // leave a detached process running, and end the stream

	ControlStarted = "started" // Process, PID, Offset
	ControlExit    = "exit"    // ExitStatus: the last message of a stream
	ControlError   = "error"   // Error: the last message of a stream
)

// Control is a text message of a stream. Fields that its type does not have are absent.
type Control struct {
	Type string `json:"type"`
	*ExecStart
	Rows   int    `json:"rows,omitempty"`
	Cols   int    `json:"cols,omitempty"`
	Signal int    `json:"signal,omitempty"`
	Bytes  uint64 `json:"bytes,omitempty"`
	// PID and Offset of a started process: Offset is the position of the first byte of output that follows, counted
	// over stdout and stderr together from the process's start.
	PID    int         `json:"pid,omitempty"`
	Offset uint64      `json:"offset,omitempty"`
	Exit   *ExitStatus `json:"exit,omitempty"`
	Error  *Error      `json:"error,omitempty"`
}

// ExecStart is what runs, without its streams. Without user, cwd and env, those of the sandbox's image apply.
type ExecStart struct {
	Command []string `json:"command,omitempty"`
	User    string   `json:"user,omitempty"`
	Cwd     string   `json:"cwd,omitempty"`
	// Env are variables, KEY=VALUE.
	Env []string `json:"env,omitempty"`
	// TTY gives it a terminal. Its output is all on stdout then.
	TTY *TTY `json:"tty,omitempty"`
	// Stdin says that the client sends stdin. Otherwise it is empty, except for a terminal or a detached process.
	Stdin bool `json:"stdin,omitempty"`
	// NoStdin gives a detached process without a terminal an empty stdin, also for those that attach.
	NoStdin bool `json:"no_stdin,omitempty"`
	// TimeoutSeconds is after how long it is killed, in the sandbox's time, which stands still in its sleep; 0 is
	// never.
	TimeoutSeconds int `json:"timeout_seconds,omitempty"`
	// Detach lets it outlive the stream. Process is its name, or empty for one of the sandbox's choice: at most 64
	// bytes. OutputKiB is how much of its newest output is kept for attach: 1 to 16384; 256 by default.
	Detach    bool   `json:"detach,omitempty"`
	Process   string `json:"process,omitempty"`
	OutputKiB int    `json:"output_kib,omitempty"`
	// HoldOutput has a detached process wait for a reader when it is OutputKiB ahead, instead of losing its oldest
	// output. A client whose Window is at most half of OutputKiB then loses nothing, whatever is cut.
	HoldOutput bool `json:"hold_output,omitempty"`
	// Window, if not 0, is how much output the server sends beyond what the client has acknowledged by ack: at least
	// MinWindow bytes. It is for clients that cannot stop reading, such as pages.
	Window int `json:"window,omitempty"`
}

// TTY is a terminal. Rows and Cols are below 65536; both 0 leave its size alone.
type TTY struct {
	Rows int    `json:"rows,omitempty"`
	Cols int    `json:"cols,omitempty"`
	Term string `json:"term,omitempty"` // TERM; empty is xterm
}

// ExitStatus says how a process ended.
type ExitStatus struct {
	// ExitCode is the command's as a shell gives it: 128 + n when signal n ended it, 126 and 127 when it could not
	// start.
	ExitCode int  `json:"exit_code"`
	Signal   int  `json:"signal,omitempty"`
	TimedOut bool `json:"timed_out,omitempty"`
	// NotStarted is why the command could not be started.
	NotStarted string `json:"not_started,omitempty"`
	// CPUMs is its processor time in milliseconds, as the guest says.
	CPUMs float64 `json:"cpu_ms,omitempty"`
}

// Encode returns the control as a text message.
func (c Control) Encode() []byte {
	text, err := json.Marshal(c)
	if err != nil {
		return []byte(`{"type":"error","error":{"code":"error","message":"a message cannot be written as JSON"}}`)
	}
	return text
}

// Process is a process of a sandbox that was started through its agent.
type Process struct {
	Process  string   `json:"process"`
	PID      int      `json:"pid"`
	Command  []string `json:"command"` // at most 4 KiB
	Detached bool     `json:"detached"`
	Attached bool     `json:"attached"`
	TTY      bool     `json:"tty,omitempty"`
	Started  string   `json:"started"` // RFC 3339
	// Exit is absent while it runs.
	Exit *ExitStatus `json:"exit,omitempty"`
	// OutputStart and OutputEnd are the offsets of the output that is kept.
	OutputStart uint64 `json:"output_start"`
	OutputEnd   uint64 `json:"output_end"`
}

// Processes is GET /v1/sandboxes/NAME/processes.
type Processes struct {
	Processes []Process `json:"processes"`
}

// Signal is POST /v1/sandboxes/NAME/processes/PROCESS/signal.
type Signal struct {
	// Signal is 1 to 64.
	Signal int `json:"signal"`
}

// Started is the answer to POST /v1/sandboxes/NAME/processes.
type Started struct {
	Process string `json:"process"`
	PID     int    `json:"pid"`
}
