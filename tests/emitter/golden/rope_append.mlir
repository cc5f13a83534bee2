// castiron emit --kernel rope_append --shape 4x2x16 --context 64 --tokens 8 --isa avx2 --threads 2
// 87 lines, sha256 540dd681b761454cbe48541caab24c5460ce678b9258a61fd693d1b3a9ea8b49
stream.executable private @rope_append_1x64_8_4x2x16_rope16_avx2_r4 {
  stream.executable.export public @rope_append_1x64_8_4x2x16_rope16_avx2_r4_fn workgroups() -> (index, index, index) {
    %n = arith.constant 2 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @rope_append_1x64_8_4x2x16_rope16_avx2_r4_fn(%b0: !stream.binding, %b1: !stream.binding, %b2: !stream.binding, %b3: !stream.binding, %b4: !stream.binding, %b5: !stream.binding, %b6: !stream.binding, %b7: !stream.binding, %i0: index) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 4 : index
      %7 = memref.alloca() alignment = 64 : memref<16xf32>
      %c2 = arith.constant 8 : index
      %c3 = arith.constant 1 : index
      %c4 = arith.constant 16 : index
      %c5 = arith.constant 2 : index
      %c6 = arith.constant 64 : index
      %c7 = arith.constant 32 : index
      %m0 = stream.binding.subspan %b0[%c0] : !stream.binding -> memref<8x128xf32>
      %m1 = stream.binding.subspan %b1[%c0] : !stream.binding -> memref<64x8xf32>
      %m2 = stream.binding.subspan %b2[%c0] : !stream.binding -> memref<64x8xf32>
      %m3 = stream.binding.subspan %b3[%c0] : !stream.binding -> memref<i32>
      %m4 = stream.binding.subspan %b4[%c0] : !stream.binding -> memref<i32>
      %m5 = stream.binding.subspan %b5[%c0] : !stream.binding -> memref<1x64x2x16xf32>
      %m6 = stream.binding.subspan %b6[%c0] : !stream.binding -> memref<1x64x2x16xf32>
      %m7 = stream.binding.subspan %b7[%c0] : !stream.binding -> memref<8x64xf32>
      %1 = memref.load %m3[] : memref<i32>
      %2 = arith.index_cast %1 : i32 to index
      %3 = memref.load %m4[] : memref<i32>
      %4 = arith.index_cast %3 : i32 to index
      %5 = stream.dispatch.workgroup.id[0] : index
      %6 = arith.muli %5, %c1 : index
      %8 = arith.addi %6, %c1 : index
      %9 = arith.minsi %8, %c2 : index
      scf.for %10 = %6 to %9 step %c3 {
        %12 = arith.addi %2, %10 : index
        scf.for %13 = %c0 to %c1 step %c3 {
          %15 = arith.muli %13, %c4 : index
          %16 = vector.load %m1[%12, %c0] : memref<64x8xf32>, vector<8xf32>
          %17 = vector.load %m2[%12, %c0] : memref<64x8xf32>, vector<8xf32>
          %18 = vector.load %m0[%10, %15] : memref<8x128xf32>, vector<8xf32>
          %19 = arith.addi %15, %c2 : index
          %20 = vector.load %m0[%10, %19] : memref<8x128xf32>, vector<8xf32>
          %21 = arith.mulf %18, %16 : vector<8xf32>
          %22 = arith.mulf %20, %17 : vector<8xf32>
          %23 = arith.subf %21, %22 : vector<8xf32>
          %24 = arith.mulf %20, %16 : vector<8xf32>
          %25 = arith.mulf %18, %17 : vector<8xf32>
          %26 = arith.addf %24, %25 : vector<8xf32>
          vector.store %23, %m7[%10, %15] : memref<8x64xf32>, vector<8xf32>
          %27 = arith.addi %15, %c2 : index
          vector.store %26, %m7[%10, %27] : memref<8x64xf32>, vector<8xf32>
        }
        %28 = arith.cmpi slt, %10, %4 : index
        scf.if %28 {
          scf.for %29 = %c0 to %c5 step %c3 {
            %31 = arith.muli %29, %c4 : index
            %32 = arith.addi %31, %c6 : index
            %33 = vector.load %m1[%12, %c0] : memref<64x8xf32>, vector<8xf32>
            %34 = vector.load %m2[%12, %c0] : memref<64x8xf32>, vector<8xf32>
            %35 = vector.load %m0[%10, %32] : memref<8x128xf32>, vector<8xf32>
            %36 = arith.addi %32, %c2 : index
            %37 = vector.load %m0[%10, %36] : memref<8x128xf32>, vector<8xf32>
            %38 = arith.mulf %35, %33 : vector<8xf32>
            %39 = arith.mulf %37, %34 : vector<8xf32>
            %40 = arith.subf %38, %39 : vector<8xf32>
            %41 = arith.mulf %37, %33 : vector<8xf32>
            %42 = arith.mulf %35, %34 : vector<8xf32>
            %43 = arith.addf %41, %42 : vector<8xf32>
            vector.store %40, %7[%c0] : memref<16xf32>, vector<8xf32>
            vector.store %43, %7[%c2] : memref<16xf32>, vector<8xf32>
            scf.for %44 = %c0 to %c4 step %c2 {
              %46 = vector.load %7[%44] : memref<16xf32>, vector<8xf32>
              vector.store %46, %m5[%i0, %12, %29, %44] : memref<1x64x2x16xf32>, vector<8xf32>
            }
            %47 = arith.addi %32, %c7 : index
            scf.for %48 = %c0 to %c4 step %c2 {
              %50 = arith.addi %47, %48 : index
              %51 = vector.load %m0[%10, %50] : memref<8x128xf32>, vector<8xf32>
              vector.store %51, %m6[%i0, %12, %29, %48] : memref<1x64x2x16xf32>, vector<8xf32>
            }
          }
        }
      }
      return
    }
  }
}
