package main

import (
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const (
		pass = `{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN TestA\n"}
{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0.5}
`
		skip = `{"Action":"output","Package":"p","Test":"TestS","Output":"=== RUN TestS\n"}
{"Action":"output","Package":"p","Test":"TestS","Output":"    s_test.go:1: no KVM here\n"}
{"Action":"skip","Package":"p","Test":"TestS"}
`
		noKVM = `{"Action":"output","Package":"p","Test":"TestK","Output":"    k_test.go:1: stat /dev/kvm: no such file\n"}
{"Action":"skip","Package":"p","Test":"TestK"}
`
		fail = `{"Action":"output","Package":"p","Test":"TestF","Output":"    f_test.go:1: wrong\n"}
{"Action":"fail","Package":"p","Test":"TestF"}
{"Action":"fail","Package":"p","Elapsed":1}
`
		done = `{"Action":"pass","Package":"p","Elapsed":1}
`
		cut = `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"TestC"}
{"Action":"output","Package":"p","Test":"TestC","Output":"    c_test.go:1: waiting\n"}
`
		long = `{"Action":"run","Package":"p","Test":"TestL"}
{"Action":"pass","Package":"p","Test":"TestL","Elapsed":90}
`
		attacks = `{"Action":"pass","Package":"p","Test":"TestAttack_a_link"}
{"Action":"fail","Package":"p","Test":"TestAttack_b_loop"}
{"Action":"fail","Package":"p","Elapsed":1}
`
		build = `{"ImportPath":"p","Action":"build-output","Output":"p.go:1:1: undefined: x\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"fail","Package":"p","Elapsed":0}
`
	)
	tests := []struct {
		name   string
		in     string
		allow  string
		strict bool
		noKVM  bool
		want   int
		says   string
	}{
		{"all pass", pass + done, "", true, false, 0, "1 tests passed in 1 packages, 0 failed, 0 skipped"},
		{"a failure shows its output and fails", pass + fail, "", false, false, 1, "f_test.go:1: wrong"},
		{"a skip is shown with its reason", pass + skip + done, "", false, false, 0, "skip  p.TestS: s_test.go:1: no KVM here"},
		{"a skip fails when strict", pass + skip + done, "", true, false, 1, "1 tests were skipped"},
		{"a skip that is allowed passes when strict", pass + skip + done, `^p\.TestS$`, true, false, 0, "skip  p.TestS"},
		{"a skip for want of KVM passes where there is none", pass + noKVM + done, "", true, true, 0, "skip  p.TestK: k_test.go:1: stat /dev/kvm: no such file"},
		{"a skip for want of KVM fails when strict where there is one", pass + noKVM + done, "", true, false, 1, "1 tests were skipped"},
		{"another skip fails when strict without KVM", pass + skip + done, "", true, true, 1, "1 tests were skipped"},
		{"a build failure shows the compiler's words", build, "", false, false, 1, "undefined: x"},
		{"no input fails", "", "", false, false, 1, "nothing was tested"},
		{"lines of go itself pass through", "go: no module\n", "", false, false, 1, "go: no module"},
		{"a test that never ended shows its output and fails", pass + cut, "", false, false, 1, "UNFINISHED  p.TestC\n    c_test.go:1: waiting"},
		{"a test that took long is shown", long + done, "", false, false, 0, "pass  p.TestL  1m30s"},
		{"attacks are listed by name", attacks, "", false, false, 1, "ATTACK SUCCEEDED  p.TestAttack_b_loop\nattack held off  p.TestAttack_a_link\n"},
		{"a wrong regexp is refused", pass, "(", false, false, 2, "missing closing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			if got := run(strings.NewReader(tt.in), &out, tt.allow, tt.strict, tt.noKVM); got != tt.want {
				t.Errorf("exit status %d, want %d", got, tt.want)
			}
			if !strings.Contains(out.String(), tt.says) {
				t.Errorf("no %q in\n%s", tt.says, &out)
			}
		})
	}
}
