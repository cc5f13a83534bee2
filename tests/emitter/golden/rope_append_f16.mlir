// castiron emit --kernel rope_append --shape 4x2x16 --context 64 --tokens 8 --cache f16 --isa avx2 --threads 2
// 85 lines, sha256 055c3c3ae073bf7785687935dcff8792fae28da5f8f037aba2e63c99dfed80df
stream.executable private @rope_append_1x64_8_4x2x16_rope16_avx2_r4_f16 {
  stream.executable.export public @rope_append_1x64_8_4x2x16_rope16_avx2_r4_f16_fn workgroups() -> (index, index, index) {
    %n = arith.constant 2 : index
    %one = arith.constant 1 : index
    stream.return %n, %one, %one : index, index, index
  }
  builtin.module {
    func.func @rope_append_1x64_8_4x2x16_rope16_avx2_r4_f16_fn(%b0: !stream.binding, %b1: !stream.binding, %b2: !stream.binding, %b3: !stream.binding, %b4: !stream.binding, %b5: !stream.binding, %b6: !stream.binding, %b7: !stream.binding, %i0: index) attributes {translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>} {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 4 : index
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
      %m5 = stream.binding.subspan %b5[%c0] : !stream.binding -> memref<1x64x2x16xf16>
      %m6 = stream.binding.subspan %b6[%c0] : !stream.binding -> memref<1x64x2x16xf16>
      %m7 = stream.binding.subspan %b7[%c0] : !stream.binding -> memref<8x64xf32>
      %1 = memref.load %m3[] : memref<i32>
      %2 = arith.index_cast %1 : i32 to index
      %3 = memref.load %m4[] : memref<i32>
      %4 = arith.index_cast %3 : i32 to index
      %5 = stream.dispatch.workgroup.id[0] : index
      %6 = arith.muli %5, %c1 : index
      %7 = arith.addi %6, %c1 : index
      %8 = arith.minsi %7, %c2 : index
      scf.for %9 = %6 to %8 step %c3 {
        %11 = arith.addi %2, %9 : index
        scf.for %12 = %c0 to %c1 step %c3 {
          %14 = arith.muli %12, %c4 : index
          %15 = vector.load %m1[%11, %c0] : memref<64x8xf32>, vector<8xf32>
          %16 = vector.load %m2[%11, %c0] : memref<64x8xf32>, vector<8xf32>
          %17 = vector.load %m0[%9, %14] : memref<8x128xf32>, vector<8xf32>
          %18 = arith.addi %14, %c2 : index
          %19 = vector.load %m0[%9, %18] : memref<8x128xf32>, vector<8xf32>
          %20 = arith.mulf %17, %15 : vector<8xf32>
          %21 = arith.mulf %19, %16 : vector<8xf32>
          %22 = arith.subf %20, %21 : vector<8xf32>
          %23 = arith.mulf %19, %15 : vector<8xf32>
          %24 = arith.mulf %17, %16 : vector<8xf32>
          %25 = arith.addf %23, %24 : vector<8xf32>
          vector.store %22, %m7[%9, %14] : memref<8x64xf32>, vector<8xf32>
          %26 = arith.addi %14, %c2 : index
          vector.store %25, %m7[%9, %26] : memref<8x64xf32>, vector<8xf32>
        }
        %27 = arith.cmpi slt, %9, %4 : index
        scf.if %27 {
          scf.for %28 = %c0 to %c5 step %c3 {
            %30 = arith.muli %28, %c4 : index
            %31 = arith.addi %30, %c6 : index
            %32 = vector.load %m1[%11, %c0] : memref<64x8xf32>, vector<8xf32>
            %33 = vector.load %m2[%11, %c0] : memref<64x8xf32>, vector<8xf32>
            %34 = vector.load %m0[%9, %31] : memref<8x128xf32>, vector<8xf32>
            %35 = arith.addi %31, %c2 : index
            %36 = vector.load %m0[%9, %35] : memref<8x128xf32>, vector<8xf32>
            %37 = arith.mulf %34, %32 : vector<8xf32>
            %38 = arith.mulf %36, %33 : vector<8xf32>
            %39 = arith.subf %37, %38 : vector<8xf32>
            %40 = arith.mulf %36, %32 : vector<8xf32>
            %41 = arith.mulf %34, %33 : vector<8xf32>
            %42 = arith.addf %40, %41 : vector<8xf32>
            %43 = arith.truncf %39 : vector<8xf32> to vector<8xf16>
            vector.store %43, %m5[%i0, %11, %28, %c0] : memref<1x64x2x16xf16>, vector<8xf16>
            %44 = arith.truncf %42 : vector<8xf32> to vector<8xf16>
            vector.store %44, %m5[%i0, %11, %28, %c2] : memref<1x64x2x16xf16>, vector<8xf16>
            %45 = arith.addi %31, %c7 : index
            scf.for %46 = %c0 to %c4 step %c2 {
              %48 = arith.addi %45, %46 : index
              %49 = vector.load %m0[%9, %48] : memref<8x128xf32>, vector<8xf32>
              %50 = arith.truncf %49 : vector<8xf32> to vector<8xf16>
              vector.store %50, %m6[%i0, %11, %28, %46] : memref<1x64x2x16xf16>, vector<8xf16>
            }
          }
        }
      }
      return
    }
  }
}
