//go:build workloads

package sandbox_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
)

// loader writes to a database without end, and has a connection to itself. When asked, it sends a byte over that
// connection and back, and answers with its pid, the port of the connection, the number of questions, of committed
// transactions and of rows, and the number of the last row.
const loader = `
import os, socket, sqlite3, threading, time
path = '/root/load.db'
def connect():
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=300)
db = connect()
db.execute('PRAGMA synchronous = FULL')
db.execute('CREATE TABLE move (n INTEGER PRIMARY KEY)')
done = 0
def write():
    global done
    while True:
        db.execute('BEGIN IMMEDIATE')
        db.execute('INSERT INTO move VALUES (?)', (done + 1,))
        db.execute('COMMIT')
        done += 1
        time.sleep(0.02)
listener = socket.create_server(('127.0.0.1', 0))
mine = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
threading.Thread(target=write, daemon=True).start()
asked = 0
while True:
    open('/run/load.ask').read()
    mine.sendall(b'x')
    other.sendall(other.recv(1))
    asked += len(mine.recv(1))
    committed = done
    rows, last = connect().execute('SELECT count(*), max(n) FROM move').fetchone()
    with open('/run/load.answer', 'w') as f:
        f.write('%d %d %d %d %d %d\n' % (os.getpid(), mine.getsockname()[1], asked, committed, rows, last or 0))
`

// A VM writes to a database and talks to itself across a sleep. This is the part of internal/test/workloads that
// takes two minutes on a soft KVM, in the image of these tests.
func TestDatabase_under_load_and_connection_to_itself_go_on_after_a_sleep(t *testing.T) {
	const name = "loaded"
	e := guesttest.New(t)
	e.Run(sandbox.Spec{Name: name})
	c := e.Agent(name)
	if err := c.WriteFile(t.Context(), "/root/loader.py", strings.NewReader(loader), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	e.Sh(name, "mkfifo /run/load.ask /run/load.answer; python3 -S -E /root/loader.py > /root/loader.log 2>&1 &")
	type state struct{ pid, port, asked, committed, rows, last int }
	ask := func() (s state) {
		t.Helper()
		said := e.Sh(name, "echo > /run/load.ask; cat /run/load.answer")
		if _, err := fmt.Sscan(said, &s.pid, &s.port, &s.asked, &s.committed, &s.rows, &s.last); err != nil {
			t.Fatalf("it says %q: %v; %s", said, err, e.Sh(name, "cat /root/loader.log"))
		}
		if s.rows != s.last || s.rows < s.committed {
			t.Errorf("a row is missing: %+v", s)
		}
		return s
	}
	before := ask()
	for before.committed == 0 {
		before = ask()
	}
	e.Sleep(name)
	e.Wake(name)
	after := ask()
	if after.pid != before.pid || after.port != before.port || after.asked != before.asked+1 || after.committed < before.committed {
		t.Errorf("before the sleep %+v, after it %+v", before, after)
	}
	// The loader must continue to write. The first answer after a wake may come before the first transaction.
	for goesOn := after; goesOn.committed == after.committed; goesOn = ask() {
		if t.Context().Err() != nil {
			t.Fatal("it does not write any more")
		}
	}
}
