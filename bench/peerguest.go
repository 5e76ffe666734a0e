package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// peerPort is the first port of the first virtio-serial device (virtio 1.2, section
// 5.3): the console of number 0 is not there.
const peerPort = "/dev/vport0p1"

// PeerReady is what the guest of a peer writes once, when its memory is filled.
const PeerReady = 'R'

// portWait bounds how long a guest waits for its port: its driver learns of it from the
// device some time after it was found.
const portWait = 10 * time.Minute

// PeerGuest is the first process of a guest of another monitor: it keeps usedMiB of
// memory in use, writes PeerReady to its port, and then answers each byte with the same
// byte. With a port of vsock it does so for each connection to that. It returns only with
// an error; the kernel of the guest panics then, and says so
// on its console. It refuses to be anything but a first process.
//
// It waits in a read(2) of its own, not in Go's poller, so that an answer costs two
// system calls.
func PeerGuest(ctx context.Context, usedMiB int, vsockPort uint32) error {
	if os.Getpid() != 1 {
		return errors.New("this is the first process of a guest, and nothing else")
	}
	if usedMiB < 0 || usedMiB > 1<<20 {
		return fmt.Errorf("%d MiB cannot be used", usedMiB)
	}
	if err := os.MkdirAll("/dev", 0o755); err != nil {
		return fmt.Errorf("making /dev: %w", err)
	}
	if err := unix.Mount("devtmpfs", "/dev", "devtmpfs", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mounting /dev: %w", err)
	}
	if vsockPort != 0 {
		memory := fill(usedMiB)
		defer runtime.KeepAlive(memory)
		return answerVsock(vsockPort)
	}
	port, err := openPort(ctx)
	if err != nil {
		return err
	}
	defer unix.Close(port)
	memory := fill(usedMiB)
	b := []byte{PeerReady}
	for {
		if _, err := unix.Write(port, b); err != nil {
			return fmt.Errorf("answering: %w", err)
		}
		for {
			n, err := unix.Read(port, b)
			if err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("waiting for a byte: %w", err)
			}
			if n == 1 {
				break
			}
			// Nobody is at the other end (drivers/char/virtio_console.c, port_fops_read).
			time.Sleep(10 * time.Millisecond)
		}
		runtime.KeepAlive(memory)
	}
}

// answerVsock answers each byte of one connection after another with the same byte.
func answerVsock(port uint32) error {
	l, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("making a socket: %w", err)
	}
	defer unix.Close(l)
	if err := unix.Bind(l, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}); err != nil {
		return fmt.Errorf("taking port %d of vsock: %w", port, err)
	}
	if err := unix.Listen(l, 16); err != nil {
		return fmt.Errorf("listening on vsock: %w", err)
	}
	for {
		c, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.ECONNRESET) {
			continue
		}
		if err != nil {
			return fmt.Errorf("waiting for a connection: %w", err)
		}
		// A connection ends when its other end does, or is gone after a resume.
		b := []byte{PeerReady}
		for {
			if _, err := unix.Write(c, b); err != nil {
				break
			}
			n, err := unix.Read(c, b)
			for errors.Is(err, unix.EINTR) {
				n, err = unix.Read(c, b)
			}
			if n != 1 {
				break
			}
		}
		unix.Close(c)
	}
}

func openPort(ctx context.Context) (int, error) {
	for begin := time.Now(); ; {
		fd, err := unix.Open(peerPort, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			return fd, nil
		}
		if time.Since(begin) > portWait || ctx.Err() != nil {
			return -1, fmt.Errorf("opening %s: %w", peerPort, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// fill makes memory of which a quarter of each page is random, so that it compresses to
// about that, as that of the programs in drowse's own guests.
func fill(mib int) []byte {
	const page = 4096
	memory := make([]byte, mib<<20)
	r := rand.NewChaCha8([32]byte{})
	for at := 0; at < len(memory); at += page {
		_, _ = r.Read(memory[at : at+page/4]) // never fails
	}
	return memory
}
