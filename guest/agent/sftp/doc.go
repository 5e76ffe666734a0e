// Package sftp is a server of the SSH file transfer protocol, version 3
// (draft-ietf-secsh-filexfer-02), with the extensions of OpenSSH that its clients use
// (PROTOCOL of OpenSSH, section 4).
//
// It runs in a separate process, with the rights of the user who has logged in, so the
// kernel decides what that user may do. It handles one request at a time in two buffers.
// Its client, which is the host, is trusted with the guest anyway: the limits only keep a
// mistake from taking the guest's memory.
package sftp
